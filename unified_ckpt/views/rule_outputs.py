"""What a rename rule outputs, as recipes: for parameters, and for the optimizer state that follows
them.

How optimizer state could silently be wrong: scaling a parameter changes its gradients, so moments
are scaled accordingly, and state whose scaling is unknown is refused. Step counts are not stacked
like parameters: all of them must be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, prod

from unified_ckpt.core.recipe_coverage import check_used_once
from unified_ckpt.core.recipes import (
    Recipe,
    Stored,
    all_equal,
    concat,
    is_scaled,
    permute,
    reshape,
    scale,
    select_index,
    slice_dim,
    stack,
    transpose,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Rule, Step

STEP = "step"  # state with one value per parameter, of whatever shape

# The power of a parameter's scale factor that scales its state: -1 for gradients, -2 for their
# squares, 1 for updates of the parameter.
_POWERS = {
    "exp_avg": -1,
    "momentum_buffer": -1,
    "grad_avg": -1,
    "exp_inf": -1,
    "exp_avg_sq": -2,
    "max_exp_avg_sq": -2,
    "square_avg": -2,
    "sum": -2,
    "acc_delta": 2,
}

Shapes = Mapping[Key, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RuleOutput:
    """Output number `target` of a rule; slice `index` of it if the rule unstacks.

    `rows` holds, for each number that is stacked, the tensor that each pattern matched. `state` is
    the kind of optimizer state, None for a parameter. `shape_key` is a tensor with the parameter's
    shape.
    """

    rule: Rule
    rows: tuple[tuple[Key, ...], ...]
    target: int
    index: int | None = None
    state: str | None = None
    shape_key: Key | None = None

    @property
    def stored(self) -> Collection[Key]:
        """Keys of all tensors whose shapes the recipe needs."""
        return [
            *(key for row in self.rows for key in row),
            *([] if self.shape_key is None else [self.shape_key]),
        ]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the recipe for tensors of these shapes.

        FormatError if the rule does not fit them.
        """
        if self._is_scalar(shapes):
            return all_equal([Stored(key, shapes[key]) for row in self.rows for key in row])
        self._check_shape(shapes)
        base = base_recipe(self.rule, self.rows, shapes, power=1)
        if not self.rule.partial:
            self._check_complete(base, shapes)
        power = self._gradient_power(base)
        if power != 1:
            base = base_recipe(self.rule, self.rows, shapes, power=power)
        return self._output(base, self.target, power)

    def _is_scalar(self, shapes: Shapes) -> bool:
        """Whether it is one number for a larger parameter, or a step count."""
        if self.state is None or prod(shapes[self.rows[0][0]]) != 1:
            return False
        return self.state == STEP or self.shape_key is None or prod(shapes[self.shape_key]) != 1

    def _check_shape(self, shapes: Shapes) -> None:
        """FormatError for state of another shape than its parameter.

        Such state holds rows, columns or blocks; how it would follow a permuted or joined parameter
        is unknown.
        """
        shape_key, shape = self.shape_key, shapes[self.rows[0][0]]
        if self.state is not None and shape_key is not None and shape != shapes[shape_key]:
            raise FormatError(
                f"{self.state!r} has shape {shape}, its parameter {shapes[shape_key]}; expected "
                'equal shapes or a scalar; add a rule with `parts = "optimizer"` for this state'
            )

    def _output(self, base: Recipe, target: int, power: int) -> Recipe:
        rule = self.rule
        if rule.unstack is not None and self.index is not None:
            base = select_index(base, rule.unstack.dim, self.index)
        elif rule.split is not None:
            dim = rule.split.dim
            sizes = rule.split.sizes or _even_sizes(base, dim, len(rule.to))
            first = sum(sizes[:target])
            base = slice_dim(base, dim, first, first + sizes[target])
        return _apply_steps(base, rule.to[target].steps, power)

    def _gradient_power(self, base: Recipe) -> int:
        if self.state is None:
            return 1
        steps = [step for target in self.rule.to for step in target.steps]
        if self.state not in _POWERS and (
            is_scaled(base) or any(step.scale is not None for step in steps)
        ):
            raise FormatError(
                f"the rule scales a parameter, and the effect on {self.state!r} is unknown; "
                f"expected one of {', '.join(_POWERS)}"
            )
        return _POWERS.get(self.state, 1)

    def _check_complete(self, base: Recipe, shapes: Shapes) -> None:
        """FormatError unless the rule's outputs use each element of its operands exactly once."""
        stored_count = sum(prod(shapes[key]) for row in self.rows for key in row)
        rows = base.shape[self.rule.unstack.dim] if self.rule.unstack is not None else 1
        targets = [self._output(base, target, 1) for target in range(len(self.rule.to))]
        output_count = rows * sum(prod(output.shape) for output in targets)
        if output_count != stored_count:
            names = ", ".join(output.name for output in self.rule.to)
            raise FormatError(
                f"the rule outputs {output_count} elements ({names}) of {stored_count}; use all of "
                "them, or set `partial = true`"
            )
        if len(targets) > 1 and self.rule.split is None and self.rule.unstack is None:
            try:
                check_used_once(targets)
            except FormatError as error:
                raise FormatError(
                    f"the rule {error}; use each element once, or set `partial = true`"
                ) from error


def base_recipe(rule: Rule, rows: Sequence[Sequence[Key]], shapes: Shapes, *, power: int) -> Recipe:
    """Return what a rule makes of its operands before splitting or unstacking."""
    parts = []
    for row in rows:
        recipes = [_apply_steps(Stored(key, shapes[key]), rule.steps, power) for key in row]
        parts.append(concat(recipes, rule.concat) if rule.concat is not None else recipes[0])
    return stack(parts, rule.stack.dim) if rule.stack is not None else parts[0]


def _apply_steps(recipe: Recipe, steps: Sequence[Step], power: int) -> Recipe:
    for step in steps:
        if step.permute is not None:
            recipe = permute(recipe, step.permute)
        elif step.transpose is not None:
            recipe = transpose(recipe, *step.transpose)
        elif step.reshape is not None:
            recipe = reshape(recipe, step.reshape)
        elif step.slice is not None:
            recipe = slice_dim(
                recipe,
                step.slice[0],
                step.slice[1],
                step.slice[2] if len(step.slice) == 3 else None,
            )
        elif step.scale is not None:
            recipe = scale(recipe, _scale_factor(step.scale, power))
    return recipe


def _scale_factor(scale: float, power: int) -> float:
    """Return the factor for optimizer state. FormatError if it would be zero or infinite."""
    try:
        factor = scale**power
    except OverflowError:
        factor = inf
    if not factor or isinf(factor):
        raise FormatError(
            f"scale {scale} to the power {power} is {factor}; expected a finite non-zero factor "
            "for optimizer state"
        )
    return factor


def _even_sizes(recipe: Recipe, dim: int, count: int) -> list[int]:
    size = recipe.shape[dim] if -len(recipe.shape) <= dim < len(recipe.shape) else 0
    if size % count:
        raise FormatError(
            f"cannot split dim {dim} of shape {recipe.shape} into {count} equal pieces; set `sizes`"
        )
    return [size // count] * count
