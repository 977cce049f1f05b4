"""What a rename rule makes of the tensors that it has found, as recipes; of parameters, and of
optimizer state, which follows them.

How optimizer state could be wrong and nobody see it: a parameter that is scaled has other
gradients, so its moments are scaled by what the rule says of gradients, and state that nothing is
known of is refused; a count is not stacked like a parameter, all of them must be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, prod

from unified_ckpt.core.nodes.coverage import check_used_once
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

STEP = "step"  # state that is one for a parameter whatever the parameter's shape

# By which power of a parameter's factor its state is scaled: a gradient by -1, its square by -2, a
# change of the parameter by 1.
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
    """Target `target` of a rule; row `index` of it where the rule unstacks.

    `rows`: of each number that is stacked, the tensor that each pattern matched. `state`: None for
    a parameter, else of which kind.
    `shape_key`: a tensor with the parameter's shape.
    """

    rule: Rule
    rows: tuple[tuple[Key, ...], ...]
    target: int
    index: int | None = None
    state: str | None = None
    shape_key: Key | None = None

    @property
    def stored(self) -> Collection[Key]:
        return [
            *(key for row in self.rows for key in row),
            *([] if self.shape_key is None else [self.shape_key]),
        ]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        if self._is_scalar(shapes):
            return all_equal([Stored(key, shapes[key]) for row in self.rows for key in row])
        self._check_shape(shapes)
        base = base_recipe(self.rule, self.rows, shapes, power=1)
        if not self.rule.partial:
            self._check_complete(base, shapes)
        power = self._gradient_power(base)
        return self._output(
            base if power == 1 else base_recipe(self.rule, self.rows, shapes, power=power),
            self.target,
            power,
        )

    def _is_scalar(self, shapes: Shapes) -> bool:
        """Whether it is one number for a parameter of more than one element, or a count whatever
        the parameter is.
        """
        if self.state is None or prod(shapes[self.rows[0][0]]) != 1:
            return False
        return self.state == STEP or self.shape_key is None or prod(shapes[self.shape_key]) != 1

    def _check_shape(self, shapes: Shapes) -> None:
        """FormatError for state of other shapes than its parameter: of rows, columns or blocks, a
        turned or joined parameter has others.
        """
        shape_key, shape = self.shape_key, shapes[self.rows[0][0]]
        if self.state is not None and shape_key is not None and shape != shapes[shape_key]:
            raise FormatError(
                f"{self.state!r} has shape {shape}, its parameter {shapes[shape_key]}: how it follows what the rule does is not known; needed the "
                'parameter\'s shape, or one number, or a rule with `parts = "optimizer"` for it'
            )

    def _output(self, base: Recipe, target: int, power: int) -> Recipe:
        rule = self.rule
        if rule.unstack is not None and self.index is not None:
            base = select_index(base, rule.unstack.dim, self.index)
        elif rule.split is not None:
            base = _split_range(
                base,
                rule.split.dim,
                rule.split.sizes or _even_sizes(base, rule.split.dim, len(rule.to)),
                target,
            )
        return _apply_steps(base, rule.to[target].steps, power)

    def _gradient_power(self, base: Recipe) -> int:
        if self.state is None:
            return 1
        steps = [step for target in self.rule.to for step in target.steps]
        if self.state not in _POWERS and (
            is_scaled(base) or any(step.scale is not None for step in steps)
        ):
            raise FormatError(
                f"its parameter is scaled, and how {self.state!r} follows that is not known; needed one of {', '.join(_POWERS)}"
            )
        return _POWERS.get(self.state, 1)

    def _check_complete(self, base: Recipe, shapes: Shapes) -> None:
        """FormatError where the rule's targets together are not each element of what they are made
        of, once.
        """
        stored_count = sum(prod(shapes[key]) for row in self.rows for key in row)
        rows = base.shape[self.rule.unstack.dim] if self.rule.unstack is not None else 1
        targets = [self._output(base, target, 1) for target in range(len(self.rule.to))]
        output_count = rows * sum(prod(output.shape) for output in targets)
        if output_count != stored_count:
            names = ", ".join(output.name for output in self.rule.to)
            raise FormatError(
                f"the rule makes {output_count} elements ({names}) of {stored_count}; needed all of them, or `partial = true`"
            )
        if len(targets) > 1 and self.rule.split is None and self.rule.unstack is None:
            try:
                check_used_once(targets)
            except FormatError as error:
                raise FormatError(
                    f"the rule {error}; needed each element once, or `partial = true`"
                ) from error


def base_recipe(rule: Rule, rows: Sequence[Sequence[Key]], shapes: Shapes, *, power: int) -> Recipe:
    """What the rule makes of its tensors before that is taken apart."""
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
    """FormatError where that is no finite number but zero: moments would all be zero, or infinite."""
    try:
        factor = scale**power
    except OverflowError:
        factor = inf
    if not factor or isinf(factor):
        raise FormatError(
            f"scale {scale} makes a factor of {factor} for optimizer state; needed one whose power {power} is a number"
        )
    return factor


def _even_sizes(recipe: Recipe, dim: int, count: int) -> list[int]:
    size = recipe.shape[dim] if -len(recipe.shape) <= dim < len(recipe.shape) else 0
    if size % count:
        raise FormatError(
            f"split of dim {dim} of shape {recipe.shape} in {count}; needed sizes, or a dim of a multiple of {count}"
        )
    return [size // count] * count


def _split_range(recipe: Recipe, dim: int, sizes: Sequence[int], index: int) -> Recipe:
    first = sum(sizes[:index])
    return slice_dim(recipe, dim, first, first + sizes[index])
