"""Tests of trainers that fail with our drop-in by design, by reason. The pages of the trainers in
docs/guide list the same reasons.
"""

from __future__ import annotations

# trainer -> reason -> tests: ids of pytest, without parameters for all of a function
BY_DESIGN: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate": {
        "An attached accelerator is freed by the garbage collector": (
            "tests/test_data_loader.py::DataLoaderTester::test_ensure_dataloader_gets_cleaned_up",
        ),
    },
    "lightning": {
        "a checkpoint is a folder: os.path.isfile is false, torch.save cannot replace it": (
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_on_exception_in_other_callbacks",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_on_exception_parametrized",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_on_exception_run_condition_on_train_batch_start",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_save_last",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_save_last_checkpoint_contents",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_save_last_none_monitor",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_resume_training_preserves_old_ckpt_last",
            "tests/tests_pytorch/core/test_saving.py::test_load_from_checkpoint_warn_on_empty_state_dict",
            "tests/tests_pytorch/models/test_hparams.py::test_load_past_checkpoint",
        ),
        "a save calls neither torch.save nor CheckpointIO": (
            "tests/tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py::test_default_checkpoint_freq",
            "tests/tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py::test_top_k",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_no_extraneous_invocations",
            "tests/tests_pytorch/checkpointing/test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options",
        ),
        "paths are local": (
            "tests/tests_pytorch/models/test_restore.py::test_strict_model_load_less_params",
            "tests/tests_pytorch/models/test_restore.py::test_strict_model_load_more_params",
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_ckpt_for_fsspec",
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_local_cross_device_checkpoint",
        ),
        "values that only pickle stores are refused": (
            "tests/tests_pytorch/callbacks/test_callbacks.py::test_resume_callback_state_saved_by_type_stateful",
            "tests/tests_pytorch/checkpointing/test_model_checkpoint.py::test_hparams_type[True]",
            "tests/tests_pytorch/models/test_hparams.py::test_collect_init_arguments[AggSubClassBoringModel]",
            "tests/tests_pytorch/models/test_hparams.py::test_collect_init_arguments[DictConfSubClassBoringModel]",
            "tests/tests_pytorch/models/test_hparams.py::test_model_with_fsspec_as_parameter",
            "tests/tests_pytorch/models/test_hparams.py::test_omega_conf_hparams",
        ),
        "errors of a missing checkpoint have another text": (
            "tests/tests_pytorch/models/test_restore.py::test_try_resume_from_non_existing_checkpoint",
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_hpc_restore_attempt",
        ),
        "map_location is a device, not a function or a dict": (
            "tests/tests_pytorch/core/test_saving.py::test_load_from_checkpoint_map_location_cpu[<lambda>]",
            "tests/tests_pytorch/core/test_saving.py::test_load_from_checkpoint_map_location_cpu[map_location4]",
        ),
        "a parameter belongs to one optimizer": (
            "tests/tests_pytorch/callbacks/test_lr_monitor.py::test_lr_monitor_multi_lrs",
            "tests/tests_pytorch/callbacks/test_lr_monitor.py::test_lr_monitor_no_lr_scheduler_multi_lrs",
        ),
        "a resume between epochs iterates the loaders once more": (
            "tests/tests_pytorch/loops/test_double_iter_in_iterable_dataset.py::test_resume_training_with",
        ),
        "private methods of the Trainer load a checkpoint before fit, validate, test or predict": (
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_loops_restore",
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_preloaded_checkpoint_lifecycle",
            "tests/tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_restore_callbacks_in_non_fit_phases",
        ),
    },
    "transformers": {
        "optimizer.pt, scheduler.pt, scaler.pt and rng_state.pth do not exist": (
            "tests/trainer/test_trainer_checkpointing.py::TrainerCheckpointSaveTest::test_save_checkpoints",
            "tests/trainer/test_trainer_checkpointing.py::TrainerBestModelTest::test_load_best_model_at_end",
            "tests/trainer/test_trainer_checkpointing.py::TrainerBestModelTest::test_load_best_model_from_safetensors",
            "tests/trainer/test_trainer_checkpointing.py::TrainerBestModelTest::test_save_best_checkpoint",
        ),
        "a folder whose files were rewritten is not resumed": (
            "tests/trainer/test_trainer_checkpointing.py::TrainerResumeTrainingTest::test_resume_training_with_checkpoint",
            "tests/trainer/test_trainer_checkpointing.py::TrainerResumeTrainingTest::test_resume_training_with_shard_checkpoint",
        ),
        "the text of an error about a path that is no checkpoint is another": (
            "tests/trainer/test_trainer_checkpointing.py::TrainerResumeTrainingTest::test_can_resume_training",
        ),
        "the Trainer's list of callbacks has ours": (
            "tests/trainer/test_trainer_callback.py::TrainerCallbackTest::test_custom_callback_added_at_init",
            "tests/trainer/test_trainer_callback.py::TrainerCallbackTest::test_default_callbacks_are_present",
            "tests/trainer/test_trainer_callback.py::TrainerCallbackTest::test_printer_callback_when_tqdm_disabled",
        ),
    },
}
