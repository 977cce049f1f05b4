"""Conversions and estimates under random options."""

from __future__ import annotations

from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.options.cases import Case, agreed_error, surroundings, tree
from tests.support.options.oracle import (
    Stored,
    check_folder,
    refusals_of_save,
    selects,
    stored_by_save,
    viewed,
)
from tests.support.options.states import FLOATS, Tensors
from tests.support.options.strategies import CONVERSIONS, valid_options
from tests.support.refusals import error_of


def run_conversion(case: Case, share: float) -> str:
    """Convert a save under random options: the target has the values, or an error leaves none."""
    random = case.random
    saved = uc.SaveOptions(fsync=False, compression=random.choice(("none", "none", "lossless")))
    assert agreed_error(case.save(saved)) is None
    sources = sorted({case.path(rank) for rank in range(case.cut.world)})
    options = valid_options(uc.ConvertOptions, random, surroundings(case.folder), share=share)
    target = case.folder / ("converted.pt" if options.to == "torch" else "converted")
    files = tree(case.folder)
    values = {name: getattr(options, name) for name in options.model_fields_set}
    stored = viewed(stored_by_save(case.state, uc.SaveOptions()), options.source)
    expected = refusals_of_convert(case, stored, options)
    source = sources if len(sources) > 1 else sources[0]
    error = error_of(lambda: uc.convert(source, target, **values))
    if error is not None:
        assert tree(case.folder) == files, f"a refused conversion left files: {error}"
        assert any(text in str(error) for text in expected), (expected, str(error), options)
        return "conversion refused"
    check_converted(stored, options, target)
    return f"converted to {options.to}"


def refusals_of_convert(case: Case, stored: Stored, options: uc.ConvertOptions) -> list[str]:
    """Return words of the documented errors of a conversion; any of them may be raised."""
    to, parts = options.to, options.parts
    compressions = {"unified": ("none", "lossless", "O1", "O2"), "paddle": ("none", "O1", "O2")}
    needing_config = ("maxtext", "paddle", "paddleformers", "paddle-flex")
    of_formats = dict.fromkeys(needing_config, "config.json") | {"peft": "adapter"}
    reasons = {
        "expected one of unified, huggingface": to not in ("unified", *CONVERSIONS[:-1]),
        f"for {to!r}, expected one of": options.compression not in compressions.get(to, ("none",)),
        "huggingface has one model": to == "huggingface" and parts and len(parts) > 1,
        "expected it alone": options.adapter and (parts or to == "peft"),
        "there is no such folder": options.adapter,
        "it lacks": parts and set(parts) - stored.parts.keys(),
        "leaves out the model": parts
        and not {"model", "master_weights"} & set(parts) & stored.parts.keys(),
        "differ from the model": options.compare and has_changed_masters(case),
        of_formats.get(to, ""): to in of_formats,
        "expected the model's names": to == "huggingface" and parts == ("optimizer",),
        "expected the model among them": to in ("torch", "orbax") and parts == ("optimizer",),
    }
    return [text for text, applies in reasons.items() if applies]


def has_changed_masters(case: Case) -> bool:
    model, masters = case.state.parts["model"], case.state.masters
    return any(not same(masters[name].to(model[name].dtype), model[name]) for name in masters)


def check_converted(stored: Stored, options: uc.ConvertOptions, target: Path) -> None:
    """Compare each tensor of the target that the format stores as it is."""
    expected = {part: dict(stored.parts[part]) for part in stored.parts if selects(options, part)}
    if options.model_dtype and "model" in expected:
        dtype, masters = FLOATS[options.model_dtype], stored.parts.get("master_weights", {})
        expected["model"] = {
            name: masters.get(name, tensor).to(dtype)
            if tensor.is_floating_point() and tensor.dtype != dtype
            else tensor
            for name, tensor in expected["model"].items()
        }
    if options.to == "unified":
        assert not uc.verify(target, deep=True).problems
        check_folder(
            target, Stored(expected, compression=options.compression), options.max_file_bytes
        )
        check_tensors(target, expected, skips_moments=options.compression in ("O1", "O2"))
        return
    if options.to in ("orbax", "huggingface"):  # orbax has masters in place of the model
        kept = "model" if options.to == "huggingface" else "ema"
        expected = {part: tensors for part, tensors in expected.items() if part == kept}
    if options.to == "torch":
        loaded = torch.load(target, weights_only=True)
        for name, tensor in expected.get("model", {}).items():
            assert same(loaded["model"][name], tensor), name
    check_tensors(target, expected)


def check_tensors(
    target: Path, expected: dict[str, Tensors], *, skips_moments: bool = False
) -> None:
    """Check what a reader of the format sees."""
    with uc.open(target) as view:
        for part, tensors in expected.items():
            for name, tensor in tensors.items():
                if not (skips_moments and "/exp_avg" in name):
                    assert same(view[part][name][...], tensor), f"{part}:{name} is not equal"


def run_estimate(case: Case, share: float) -> str:
    """Check that an estimate says the bytes of each file that the save of one rank then writes."""
    random, around = case.random, surroundings(case.folder)
    options = valid_options(uc.SaveOptions, random, around, share=share)
    rules = valid_options(uc.ManagerOptions, random, around, share=share)
    has_steps = rules.interval_steps is not None and not rules.interval_seconds
    steps = random.choice((None, 100, range(10, 20))) if has_steps else None
    state = {part: tensors for part, tensors in case.state.parts.items() if part != "ema"}
    parts = {"ema": case.state.parts["ema"]} if "ema" in case.state.parts else None
    passed_rules = rules if steps is not None else random.choice((None, rules))
    expected = refusals_of_save(case.state, options, has_extra=False)
    estimates = list[uc.Estimate]()

    def predict() -> None:
        estimate = uc.estimate(
            state["model"],
            state.get("optimizer"),
            master_weights=state.get("master_weights"),
            parts=parts,
            options=options,
            manager_options=passed_rules,
            interval_seconds=random.choice((None, 60.0)),
            steps=steps,
        )
        estimates.append(estimate)

    error = error_of(predict)
    if error is not None:
        expected += ["steps: "] if steps is not None and rules.continuous else []
        assert any(text in str(error) for text in expected), (expected, error)
        return "estimate refused"
    assert not expected, f"expected an error with {expected}"
    path = case.folder / "estimated"
    uc.save(path, options=options, parts=parts, **state)
    written = {
        file.name: file.stat().st_size
        for file in path.iterdir()
        if file.name != "unified_checkpoint.json" and ".exceptions." not in file.name
    }
    if options.compression == "none":
        assert estimates[0].files == written
    assert str(estimates[0])
    return "estimated"
