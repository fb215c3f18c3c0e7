"""How far a tuned model's outputs may be from the reference's, and what becomes of forms that are further."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from ..compile.executable import build_executable
from ..frontends.verify import CHANGE, compare
from ..runtime import Model
from .forms import Form, Forms
from .reference import Reference
from .session import Session

__all__ = ["ROUNDINGS", "TOLERANCE", "Accuracy"]

TOLERANCE = 1e-4
"""Largest accepted difference from the reference, relative to the largest value of that output (float32), unless a
GraphConfig asks for less..."""

ROUNDINGS = 8
"""... and so many roundings of the least precise type that the model computes in, where that is more: 8e-3 for float16,
6e-2 for bfloat16. Of quantised models `Reference.roundings` tells more."""

OVERFLOWN = sys.float_info.max
"""The relative error of outputs that are no numbers."""

SCREENING_SHARE = 0.02
"""Of the time budget, what one run of the untuned model may take for forms with fast math to be checked early."""


@dataclass
class Accuracy:
    """Which forms compute what the reference does, closely enough: asked before they are tuned, and after.

    Attributes
    ----------
    session : Session
    reference : Reference
    verify : bool
        False: forms with fast math are used unchecked.
    limit : float
        See `TOLERANCE`.
    refused_for : float
        The smallest relative error for which a form was refused; `inf` where none was.
    """

    session: Session
    reference: Reference
    verify: bool
    limit: float = TOLERANCE
    refused_for: float = math.inf

    def errors(self, run: Model) -> tuple[float, float]:
        """Largest absolute and relative difference of the outputs from the reference's."""
        outputs = run(*self.reference.inputs)
        absolute, relative = compare(outputs, self.reference.outputs)
        if relative <= self.tolerance or not self.reference.orders:
            return absolute, relative
        return compare(outputs, self.reference.outputs, self.reference.undecided(self.tolerance))

    @property
    def tolerance(self) -> float:
        """Largest accepted difference, relative to the largest value of an output."""
        return max(self.limit, self.reference.roundings, ROUNDINGS * self.reference.epsilon)

    def excuse(self) -> str:
        """Said of a model that differs, where it makes so much of roundings that no other order of sums could pass."""
        moved = self.reference.sensitivity(self.tolerance)
        if not moved > self.tolerance:
            return ""
        what = "how long its outputs are, or finite" if moved == math.inf else f"its outputs by {moved:.0e}"
        return (
            f"The model itself makes much of roundings: inputs changed by {CHANGE:.0e} of their values change {what} "
            f"(as weights at random may; without comparison: verify=False, --no-verify). "
        )

    def permits(self, form: Form, run: Model) -> bool:
        """Whether the form may compete: False for one with fast math that is too inaccurate, which is remembered."""
        if not form.lossy or not self.verify:
            return True
        _, relative = self.errors(run)
        return self._judge(form, relative)

    def not_refused(self, forms: Forms) -> Forms:
        """The forms that no earlier run found too inaccurate."""
        return Forms([form for form in forms.forms if self._known(form) is not False])

    def screened(self, forms: Forms) -> Forms:
        """The forms that are worth tuning: the first with fast math runs untuned once, where there is time for that.

        If it is too inaccurate, so does the next. The others are checked when they are built, as all are.
        """
        kept: list[Form] = []
        for form in forms.forms:
            if any(other.lossy for other in kept) or self._passes(form):
                kept.append(form)
        return Forms(kept)

    def _passes(self, form: Form) -> bool:
        if not form.lossy or not self.verify or not self.session.runs or self._known(form):
            return True
        budget_s = self.session.budget.time_s
        if self.reference.plain or (budget_s is not None and self.reference.rough_s > SCREENING_SHARE * budget_s):
            return True
        run = self.session.models.load(build_executable(form.mod, self.session.target))
        return self._judge(form, self.errors(run)[1])

    def _known(self, form: Form) -> bool | None:
        """Whether the form was accurate enough when it was last checked; None where it was not."""
        if not (form.lossy and self.verify):
            return None
        known = self.session.work.database.get_number(self._key(form), "max_rel_error")
        return None if known is None else self._judge(form, known)

    def _judge(self, form: Form, relative: float) -> bool:
        relative = min(relative, OVERFLOWN)  # JSON has no infinity
        self.session.work.database.put_json(self._key(form), {"max_rel_error": relative})
        if relative <= self.tolerance:
            return True
        self.refused_for = min(self.refused_for, relative)
        self.session.progress.say(f"fast math is refused ({self._why}): the form without it is used")
        return False

    def verdict(self, form: Form) -> str:
        """What became of fast math, where `form` won: for people."""
        if form.lossy:
            return "used"
        return "not faster" if self.refused_for == math.inf else f"refused: {self._why}"

    def _key(self, form: Form) -> str:
        return f"accuracy:{self.reference.key}:{form.digest}"

    @property
    def _why(self) -> str:
        if self.refused_for == OVERFLOWN:
            return "outputs are not finite where the reference's are, or have another shape"
        return f"off by {self.refused_for:.1e} of the largest value, where {self.tolerance:.0e} is allowed"
