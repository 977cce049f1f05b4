"""What a rename rule makes of the tensors that it has found, as recipes; of parameters, and of optimizer state, which follows them.

How optimizer state could be wrong and nobody see it: a parameter that is scaled has other gradients, so its moments are scaled by what the
rule says of gradients, and state that nothing is known of is refused; a count is not stacked like a parameter, all of them must be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, prod

from unified_ckpt.core.nodes.coverage import check_once
from unified_ckpt.core.recipes import (
    Recipe,
    Stored,
    alike,
    cut,
    is_scaled,
    joined,
    picked,
    reshaped,
    scaled,
    stacked,
    swapped,
    turned,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Rule, Step

COUNT = "step"  # state that is one for a parameter whatever the parameter's shape

# By which power of a parameter's factor its state is scaled: a gradient by -1, its square by -2, a change of the parameter by 1.
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
class Product:
    """Target `target` of a rule; row `index` of it where the rule unstacks.

    `rows`: of each number that is stacked, the tensor that each pattern matched. `state`: None for a parameter, else of which kind.
    `leader`: a tensor with the parameter's shape.
    """

    rule: Rule
    rows: tuple[tuple[Key, ...], ...]
    target: int
    index: int | None = None
    state: str | None = None
    leader: Key | None = None

    @property
    def stored(self) -> Collection[Key]:
        return [
            *(key for row in self.rows for key in row),
            *([] if self.leader is None else [self.leader]),
        ]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        if self._is_count(shapes):
            return alike([Stored(key, shapes[key]) for row in self.rows for key in row])
        self._check_follows(shapes)
        base = made_of(self.rule, self.rows, shapes, power=1)
        if not self.rule.partial:
            self._check_whole(base, shapes)
        power = self._power(base)
        return self._of(
            base if power == 1 else made_of(self.rule, self.rows, shapes, power=power),
            self.target,
            power,
        )

    def _is_count(self, shapes: Shapes) -> bool:
        """Whether it is one number for a parameter of more than one element, or a count whatever the parameter is."""
        if self.state is None or prod(shapes[self.rows[0][0]]) != 1:
            return False
        return self.state == COUNT or self.leader is None or prod(shapes[self.leader]) != 1

    def _check_follows(self, shapes: Shapes) -> None:
        """FormatError for state of other shapes than its parameter: of rows, columns or blocks, a turned or joined parameter has others."""
        of, found = self.leader, shapes[self.rows[0][0]]
        if self.state is not None and of is not None and found != shapes[of]:
            raise FormatError(
                f"{self.state!r} has shape {found}, its parameter {shapes[of]}: how it follows what the rule does is not known; needed the "
                'parameter\'s shape, or one number, or a rule with `parts = "optimizer"` for it'
            )

    def _of(self, base: Recipe, target: int, power: int) -> Recipe:
        rule = self.rule
        if rule.unstack is not None and self.index is not None:
            base = picked(base, rule.unstack.dim, self.index)
        elif rule.split is not None:
            base = _portion(
                base,
                rule.split.dim,
                rule.split.sizes or _even(base, rule.split.dim, len(rule.to)),
                target,
            )
        return _stepped(base, rule.to[target].steps, power)

    def _power(self, base: Recipe) -> int:
        if self.state is None:
            return 1
        steps = [one for target in self.rule.to for one in target.steps]
        if self.state not in _POWERS and (
            is_scaled(base) or any(one.scale is not None for one in steps)
        ):
            raise FormatError(
                f"its parameter is scaled, and how {self.state!r} follows that is not known; needed one of {', '.join(_POWERS)}"
            )
        return _POWERS.get(self.state, 1)

    def _check_whole(self, base: Recipe, shapes: Shapes) -> None:
        """FormatError where the rule's targets together are not each element of what they are made of, once."""
        there = sum(prod(shapes[key]) for row in self.rows for key in row)
        rows = base.shape[self.rule.unstack.dim] if self.rule.unstack is not None else 1
        targets = [self._of(base, target, 1) for target in range(len(self.rule.to))]
        made = rows * sum(prod(one.shape) for one in targets)
        if made != there:
            names = ", ".join(one.name for one in self.rule.to)
            raise FormatError(
                f"the rule makes {made} elements ({names}) of {there}; needed all of them, or `partial = true`"
            )
        if len(targets) > 1 and self.rule.split is None and self.rule.unstack is None:
            try:
                check_once(targets)
            except FormatError as error:
                raise FormatError(
                    f"the rule {error}; needed each element once, or `partial = true`"
                ) from error


def made_of(rule: Rule, rows: Sequence[Sequence[Key]], shapes: Shapes, *, power: int) -> Recipe:
    """What the rule makes of its tensors before that is taken apart."""
    parts = []
    for row in rows:
        each = [_stepped(Stored(key, shapes[key]), rule.steps, power) for key in row]
        parts.append(joined(each, rule.concat) if rule.concat is not None else each[0])
    return stacked(parts, rule.stack.dim) if rule.stack is not None else parts[0]


def _stepped(of: Recipe, steps: Sequence[Step], power: int) -> Recipe:
    for step in steps:
        if step.permute is not None:
            of = turned(of, step.permute)
        elif step.transpose is not None:
            of = swapped(of, *step.transpose)
        elif step.reshape is not None:
            of = reshaped(of, step.reshape)
        elif step.slice is not None:
            of = cut(
                of, step.slice[0], step.slice[1], step.slice[2] if len(step.slice) == 3 else None
            )
        elif step.scale is not None:
            of = scaled(of, _power_of(step.scale, power))
    return of


def _power_of(scale: float, power: int) -> float:
    """FormatError where that is no finite number but zero: moments would all be zero, or infinite."""
    try:
        found = scale**power
    except OverflowError:
        found = inf
    if not found or isinf(found):
        raise FormatError(
            f"scale {scale} makes a factor of {found} for optimizer state; needed one whose power {power} is a number"
        )
    return found


def _even(of: Recipe, dim: int, count: int) -> list[int]:
    size = of.shape[dim] if -len(of.shape) <= dim < len(of.shape) else 0
    if size % count:
        raise FormatError(
            f"split of dim {dim} of shape {of.shape} in {count}; needed sizes, or a dim of a multiple of {count}"
        )
    return [size // count] * count


def _portion(of: Recipe, dim: int, sizes: Sequence[int], index: int) -> Recipe:
    first = sum(sizes[:index])
    return cut(of, dim, first, first + sizes[index])
