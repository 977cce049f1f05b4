"""Public reports about checkpoints of training jobs, and what this library does in each situation.

Each row has one test, marked `@pytest.mark.incident(report)`: in this folder, or where the same
situation is tested already. `docs/build_incidents.py` writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass

# Name in a report -> repository on GitHub.
REPOSITORIES = {
    "AReaL": "areal-project/AReaL",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "DLRover": "intelligent-machine-learning/dlrover",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "InstantTensor": "scitix/InstantTensor",
    "KempnerForge": "KempnerInstitute/KempnerForge",
    "Lightning": "Lightning-AI/pytorch-lightning",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NVRx": "NVIDIA/nvidia-resiliency-ext",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "NeMo-Speech": "NVIDIA-NeMo/Speech",
    "OpenTau": "TensorAuto/OpenTau",
    "PaddleNLP": "PaddlePaddle/PaddleNLP",
    "ROCm-Megatron-LM": "ROCm/Megatron-LM",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "VeOmni": "ByteDance-Seed/VeOmni",
    "accelerate": "huggingface/accelerate",
    "fairchem": "facebookresearch/fairchem",
    "flashoptim": "databricks/flashoptim",
    "marin": "marin-community/marin",
    "miles-credit": "NCAR/miles-credit",
    "nanochat": "karpathy/nanochat",
    "nanotron": "huggingface/nanotron",
    "orbax": "google/orbax",
    "physicsnemo": "NVIDIA/physicsnemo",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch": "pytorch/pytorch",
    "speculators": "vllm-project/speculators",
    "syne-tune": "syne-tune/syne-tune",
    "tinker-feedback": "thinking-machines-lab/tinker-feedback",
    "torchrec": "meta-pytorch/torchrec",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "ultralytics": "ultralytics/ultralytics",
    "verl": "verl-project/verl",
}


@dataclass(frozen=True, slots=True)
class Incident:
    """One report: `situation` is what happened there, `outcome` what happens here.

    `report`: a name of `REPOSITORIES` and the number of an issue or pull request.
    """

    report: str
    situation: str
    outcome: str

    @property
    def url(self) -> str:
        """Return the address; GitHub leads from an issue's to that of a pull request."""
        name, number = self.report.split("#")
        return f"https://github.com/{REPOSITORIES[name]}/issues/{number}"


# Section of the page -> its rows.
INCIDENTS: dict[str, tuple[Incident, ...]] = {
    "Saves in the background": (
        Incident(
            "pytorch#144657",
            "CPU parameters that change after an asynchronous save are stored as they are later.",
            "The values at the call are stored.",
        ),
        Incident(
            "NVRx#376",
            "The step count on the CPU is that of the next step; the moments beside it are not.",
            "All state is of one step, also in lazy saves.",
        ),
        Incident(
            "NeMo-RL#3312",
            "After weights were offloaded and moved back, each save stores those of the first.",
            "The memory of each save is read, also with a reused plan.",
        ),
        Incident(
            "Megatron-LM#2288",
            "Memory of staged tensors is given to others while the writer still reads it.",
            "The writer reads memory of its own.",
        ),
        Incident(
            "Megatron-LM#833",
            "Copies to the host are queued on a device; nothing waits for them before the write.",
            "The call waits for all of them once.",
        ),
        Incident(
            "InstantTensor#19",
            "A driver that refuses to pin a large range ends the job.",
            "A warning; the copy goes to memory that is not pinned, and training sees no error.",
        ),
        Incident(
            "pytorch#155192",
            "Staging has to keep track of tensors that share memory.",
            "Each tensor is stored as its view of the memory shows it.",
        ),
        Incident(
            "torchrec#4309",
            "A tensor whose memory is freed meanwhile cannot be staged, or is left out.",
            "An error names the tensor; a save leaves the memory resizable.",
        ),
        Incident(
            "DLRover#1585",
            "A snapshot overwrites the one before, which is still being written.",
            "A save waits for the one before.",
        ),
        Incident(
            "torchtitan#930",
            "A load right after an asynchronous save finds no checkpoint.",
            "The load waits for the save.",
        ),
        Incident(
            "Megatron-Bridge#3267",
            "The step that the background stores is the one that training has reached meanwhile.",
            "Objects and numbers are copied at the call.",
        ),
        Incident(
            "AReaL#1615",
            "Weights that are offloaded stay in memory until an asynchronous save has ended.",
            "Memory is free once it is copied.",
        ),
        Incident(
            "pytorch#170163",
            "Each asynchronous save leaves memory behind.",
            "Memory, mappings and open files do not grow.",
        ),
        Incident(
            "DLRover#1378",
            "The program ends while its last asynchronous save is being written.",
            "The exit waits for the save.",
        ),
        Incident(
            "VeOmni#1181",
            "An asynchronous save that fails on one rank raises an error on that rank only.",
            "Every rank raises the error once.",
        ),
        Incident(
            "Megatron-LM#1435",
            "One failed save ends the training.",
            "A failed save is retried with the current state; training continues.",
        ),
    ),
    "Which ranks store what": (
        Incident(
            "OpenTau#396",
            "Ranks that start in different seconds write into folders named by the time.",
            "An error on every rank; nothing is written.",
        ),
        Incident(
            "accelerate#2000",
            "Only the main process calls the save, which waits for the others for ever.",
            "After a timeout, an error names the ranks that did not call.",
        ),
        Incident(
            "DLRover#1146",
            "The commit waits for shards of which fewer than expected are ready.",
            "After a timeout without progress, an error names the rank.",
        ),
        Incident(
            "nanochat#315",
            "Ranks write before rank 0 has created the folder.",
            "Folders are created before any rank writes.",
        ),
        Incident(
            "transformers#27925",
            "The temporary folder of several nodes is renamed by more than one of them.",
            "One rank publishes the folder for all nodes.",
        ),
        Incident(
            "DeepSpeed#2319",
            "Each node has only the files of its own ranks, on a local disk.",
            "The folders of the nodes load together, on any nodes.",
        ),
        Incident(
            "Automodel#3248",
            "Rank 0 does not know a name of another pipeline stage, and fails at the index.",
            "The checkpoint has the names of all stages.",
        ),
        Incident(
            "pytorch#171885",
            "All ranks merge files, and nobody writes the index.",
            "The index names every tensor and its file.",
        ),
        Incident(
            "Automodel#301",
            "Tensors without dims are lost when shards are merged.",
            "They are stored in the merged file.",
        ),
        Incident(
            "pytorch#192485",
            "Merging fails at integers and booleans, after the shards were written.",
            "Every dtype is merged.",
        ),
        Incident(
            "nanotron#107",
            "Names of files contain the mesh: with a new mesh dim, no shard is found.",
            "Names and bytes of files do not depend on the ranks.",
        ),
        Incident(
            "pytorch#149785",
            "Planning takes 90 seconds of each save on 256 ranks.",
            "A save with the layout of the last one exchanges no plan.",
        ),
        Incident(
            "pytorch#189945",
            "Rows at the end that no rank holds are cut off.",
            "An error on every rank; nothing is written.",
        ),
        Incident(
            "flashoptim#3",
            "Quantized state of shards is taken for replicated; the next step explodes.",
            "What ranks share is compared at each save; a difference is an error.",
        ),
        Incident(
            "miles-credit#414",
            "An average of local shards covers only one rank's part of the weights.",
            "All shards are stored, as one tensor.",
        ),
        Incident(
            "Megatron-Bridge#3832",
            "Ranks with a schedule of their own resume with that of rank 0.",
            "Each rank gets its own state.",
        ),
        Incident(
            "Megatron-LM#3510",
            "A rank without parameters has no optimizer state, which breaks the save.",
            "The state of the others is stored and loaded.",
        ),
    ),
    "Another number of ranks": (
        Incident(
            "DeepSpeed#2898",
            "Optimizer state cannot be loaded by another number of ranks.",
            "Any number of ranks loads it.",
        ),
        Incident(
            "Megatron-LM#1517",
            "A checkpoint of pipeline stages cannot be loaded by expert-parallel ranks.",
            "Parameters and their state are found by name.",
        ),
        Incident(
            "Lightning#19585",
            "A sharded run cannot continue on another number of GPUs.",
            "It does, in Lightning too.",
        ),
        Incident(
            "ROCm-Megatron-LM#63",
            "The halves of a fused weight change places on another number of GPUs.",
            "`Strided` declares the sections; they come back in order.",
        ),
        Incident(
            "pytorch#108869",
            "A rank whose shard is empty cannot load.",
            "It loads its 0 rows.",
        ),
        Incident(
            "torchtitan#811",
            "On fewer ranks, the data positions of the other ranks are dropped silently.",
            "Positions without a place are kept back, and a warning names them.",
        ),
        Incident(
            "Megatron-Bridge#5637",
            "A run on fewer ranks continues the data of the first ones only.",
            "The position is left unchanged, and a warning says why.",
        ),
        Incident(
            "VeOmni#853",
            "On another mesh, ranks that must read the same data read different data.",
            "Positions follow the coordinates of the mesh.",
        ),
        Incident(
            "Megatron-LM#7413",
            "Ranks with different data share a file, and resume at one position.",
            "Each rank stores its own; on another mesh none is chosen silently.",
        ),
        Incident(
            "OpenTau#180",
            "On more GPUs, all new ranks draw the same random numbers.",
            "Each rank derives a state of its own.",
        ),
    ),
    "What a resume restores": (
        Incident(
            "verl#7952",
            "Asynchronous saves leave no tracker file, so that a restart begins at step 0.",
            "Steps are found by their manifests.",
        ),
        Incident(
            "verl#7953",
            "The scheduler is saved at each step and dropped at each resume.",
            "A warning names saved state that no rank loads.",
        ),
        Incident(
            "Automodel#763",
            "The learning rate begins again after a resume.",
            "Optimizer and scheduler continue.",
        ),
        Incident(
            "tinker-feedback#127",
            "A resume with the optimizer equals one without it.",
            "The next step is that of the uninterrupted run, bit for bit.",
        ),
        Incident(
            "AReaL#1468",
            "A load without the optimizer's moments says nothing.",
            "An error names them; the target is unchanged.",
        ),
        Incident(
            "KempnerForge#51",
            "The data loader was never saved, and each resume begins the epoch again.",
            "A load of state that was not saved is an error.",
        ),
        Incident(
            "accelerate#4165",
            "All ranks write the data position to one file.",
            "Each rank gets its own.",
        ),
        Incident(
            "prime-rl#1035",
            "Buffers of samples that each rank packs are not restored.",
            "Nested values of each rank return to it.",
        ),
        Incident(
            "Megatron-LM#6858",
            "252 of 256 ranks resume with the random state of another rank.",
            "Each rank gets its own.",
        ),
        Incident(
            "Lightning#19764",
            "A resume within an epoch repeats samples.",
            "It continues at the next sample.",
        ),
        Incident(
            "ultralytics#25812",
            "A resumed run loads the pretrained weights over those of its checkpoint.",
            "A step of the run comes before the paths to start from.",
        ),
        Incident(
            "marin#5217",
            "Newer temporary checkpoints elsewhere are not seen; an older step is resumed.",
            "The latest step of both tiers is resumed.",
        ),
        Incident(
            "ultralytics#22189",
            "The scale of the loss is not saved, and begins again.",
            "A GradScaler in `extra` continues.",
        ),
        Incident(
            "Automodel#836",
            "The folder has the checkpoints of another model.",
            "An error lists the differences; the target is unchanged.",
        ),
        Incident(
            "DLRover#907",
            "Ranks load different steps.",
            "An error on every rank; the targets are unchanged.",
        ),
        Incident(
            "transformers#29059",
            "A Trainer's folder without `trainer_state.json` cannot be used.",
            "`uc.load` reads its weights and optimizer.",
        ),
    ),
    "Optimizers": (
        Incident(
            "Megatron-LM#602",
            "A save before the first step of the optimizer fails.",
            "It is stored without state, and loads.",
        ),
        Incident(
            "nanotron#68",
            "The state of a tied weight is not found under its second name.",
            "A tied weight has one state, under any of its names.",
        ),
        Incident(
            "pytorch#113673",
            "State is stored by number, and the order of parameters is another one.",
            "State follows the names of parameters.",
        ),
        Incident(
            "pytorch#192202",
            "The state of parameters that are frozen now is dropped.",
            "It is saved and loaded.",
        ),
        Incident(
            "prime-rl#2800",
            "Parameters without a gradient have no saved state, which each resume then misses.",
            "Their state is absent after the load, as it was.",
        ),
        Incident(
            "KempnerForge#115",
            "A fresh optimizer has no tensors to fill, so its moments begin at 0.",
            "State is created from the checkpoint, without a step.",
        ),
        Incident(
            "Lightning#11741",
            "State that belongs to no parameter, as MADGRAD has, breaks the resume.",
            "It is saved and loaded.",
        ),
        Incident(
            "OpenTau#185",
            "Float32 copies that a wrapper keeps are rounded at each resume.",
            "Such a class is an error; with `master_weights=` the copies return exactly.",
        ),
        Incident(
            "pytorch#191918",
            "Momentum of float32 gradients gets the bfloat16 of its parameter.",
            "State has the dtype that the next step reads.",
        ),
        Incident(
            "pytorch#126950",
            "Moments of a DTensor are plain tensors after a load.",
            "They are DTensors with the same placements.",
        ),
        Incident(
            "TransformerEngine#2795",
            "Local moments of a DTensor are taken for whole tensors.",
            "State has the kind that the optimizer's class gives it.",
        ),
        Incident(
            "PaddleNLP#9095",
            "Sharded moments of a replicated parameter are assigned to the whole of it.",
            "They keep their layout; without it, an error says to step once.",
        ),
    ),
    "Loads": (
        Incident(
            "pytorch#187138",
            "A load into another dtype rounds or truncates silently.",
            "An error, unless `cast=True`.",
        ),
        Incident(
            "pytorch#148252",
            "Names that only the checkpoint has are ignored.",
            "An error lists them, unless `strict=False`.",
        ),
        Incident(
            "Lightning#20274",
            "`strict=False` has no effect on sharded checkpoints.",
            "The load fills what fits, and reports the rest.",
        ),
        Incident(
            "pytorch#126881",
            "State of objects that create it later is not loaded.",
            "Objects get all of their state.",
        ),
        Incident(
            "pytorch#126952",
            "A flipped bit is loaded.",
            "An error names the file and the tensor.",
        ),
        Incident(
            "pytorch#76331",
            "A slice reads whole tensors.",
            "Only its bytes are read.",
        ),
        Incident(
            "torchtitan#961",
            "After a resume, a compiled model is saved under other names.",
            "Prefixes of wrappers are removed.",
        ),
        Incident(
            "Automodel#2682",
            "The weights are loaded into a copy, and the model keeps its own.",
            "If `state_dict()` returns copies, the module's `load_state_dict()` gets the tensors.",
        ),
        Incident(
            "pytorch#189308",
            "A checkpoint's metadata runs code when it is read.",
            "Nothing in a checkpoint is executed; an error names the class.",
        ),
        Incident(
            "transformers#43140",
            "A file of random states runs code when it is read.",
            "Only a restricted reader loads pickles.",
        ),
    ),
    "Interrupted and damaged saves": (
        Incident(
            "Automodel#3254",
            "An interrupted save leaves a folder, at which all ranks hang later.",
            "The run resumes from the step before, and replaces the folder.",
        ),
        Incident(
            "transformers#35782",
            "The newest checkpoint is incomplete, and the job cannot resume.",
            "The step before is resumed, with a warning.",
        ),
        Incident(
            "torchtitan#4011",
            "A step counts as valid if its metadata exists, whatever became of its data.",
            "A load compares digests, and then resumes the step before.",
        ),
        Incident(
            "speculators#739",
            "A file of the newest checkpoint was cut short by a crash, and ends each restart.",
            "Files are checked by size; the step before is resumed.",
        ),
        Incident(
            "Lightning#688",
            "A job that dies during a save destroys the only checkpoint.",
            "A checkpoint is replaced only by a complete one.",
        ),
        Incident(
            "transformers#14922",
            "The disk becomes full during a save, and the training ends.",
            "Older checkpoints stay, and training continues.",
        ),
    ),
    "Which checkpoints stay": (
        Incident(
            "KempnerForge#102",
            "The latest step is named before its asynchronous save is complete.",
            "A step counts once it is committed.",
        ),
        Incident(
            "Megatron-Bridge#4678",
            "The only complete checkpoint is deleted while the next is being saved.",
            "It stays until the next is committed.",
        ),
        Incident(
            "Megatron-Bridge#5184",
            "An unfinished folder counts as the newest, and the complete one is deleted.",
            "Only complete checkpoints count.",
        ),
        Incident(
            "Megatron-Bridge#5296",
            "Folders below a sibling count as checkpoints of the run.",
            "Only steps directly in the root count.",
        ),
        Incident(
            "verl#4667",
            "Asynchronous saves that remove the previous checkpoint fail.",
            "One complete checkpoint exists at any time.",
        ),
        Incident(
            "transformers#25129",
            "A limit of one, with the best model, deletes all checkpoints.",
            "The best and the latest always stay.",
        ),
        Incident(
            "transformers#27138",
            "Copied files have other times, and the newest checkpoint is deleted.",
            "Checkpoints are ordered by step.",
        ),
        Incident(
            "transformers#48315",
            "A run fails at its end because its best checkpoint was not copied along.",
            "The best of the existing ones counts.",
        ),
        Incident(
            "NeMo-Speech#13581",
            "A checkpoint that was removed by hand ends the training.",
            "Training continues.",
        ),
        Incident(
            "fairchem#1242",
            "A link to a checkpoint is counted and removed like one, which fails.",
            "A link is no step, and stays.",
        ),
        Incident(
            "Lightning#16426",
            "Rotation deletes the checkpoint of another run.",
            "Only checkpoints of this library are removed.",
        ),
        Incident(
            "marin#3957",
            "The last step is not saved unless the interval divides it.",
            "`finish` saves it.",
        ),
    ),
    "Buckets": (
        Incident(
            "Lightning#21813",
            "Rotation in a bucket deletes the checkpoint of an earlier run that was resumed.",
            "Only steps of the own root are removed.",
        ),
        Incident(
            "syne-tune#363",
            "The prefix of one run is also that of runs with longer names, whose files are taken.",
            "A name ends with a slash: neither runs nor steps with longer names are touched.",
        ),
        Incident(
            "marin#9213",
            "An upload fails on one rank, and the others wait for it for half an hour.",
            "All ranks raise the error at once.",
        ),
        Incident(
            "pytorch#144752",
            "A save to a bucket fails because its files cannot be synced.",
            "Nothing is synced. The objects equal the files on a disk.",
        ),
        Incident(
            "physicsnemo#1967",
            "A job that is killed while it uploads leaves half a file in place of the last one.",
            "Uploads are invisible until all are there.",
        ),
        Incident(
            "orbax#394",
            "Checkpoints that were copied to a bucket lack a mark, and count as unfinished.",
            "They are complete by their manifest, which is copied along.",
        ),
        Incident(
            "Lightning#18261",
            "The last checkpoint in a bucket is not found, and training starts afresh.",
            "It is found and resumed.",
        ),
        Incident(
            "Lightning#18865",
            "A link to the last checkpoint fails in a bucket, in the middle of the training.",
            "It is refused before the training starts.",
        ),
    ),
}
