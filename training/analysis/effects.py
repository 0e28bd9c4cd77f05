"""
2^k r factorial analysis: which factors matter, how sure that is, and whether to believe it.

    python -m training.factorial --csv FILE --factors A,B,C --response p95_us

Every factor is measured at two levels, every combination r times. The table's rows are runs; a
factor's lower level (numbers by size, words by alphabet) counts as -1. The model, its sign table,
confidence intervals and residual checks are those of R. Jain, The Art of Computer Systems
Performance Analysis (1991), chapters 17 and 18.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser
from env.inputs.text_files import MOST_RECORD_BYTES, read_expanded

FloatArray = npt.NDArray[np.float64]

MULTIPLICATIVE_RATIO = 10.0  # Jain, 18.8: largest over smallest response that asks for logarithms
MOST_FACTORS = 10


@dataclass(frozen=True)
class Effect:
    """
    One column of the sign table.

    :param name: the factors, joined by `×`; `mean` for the constant
    :param signs: -1 or 1 for each combination
    :param value: half of what the response changes by from the lower to the upper level
    :param low: lower end of its confidence interval
    :param high: upper end
    :param share: of the total variation; 0 for the mean
    """

    name: str
    signs: tuple[int, ...]
    value: float
    low: float
    high: float
    share: float

    @property
    def significant(self) -> bool:
        """Whether the confidence interval leaves out 0."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True)
class Factorial:
    """
    What a 2^k r experiment shows.

    :param factors: their names; the first one changes fastest from row to row
    :param responses: float[2^k, r], as analysed (logarithms for a multiplicative model)
    :param effects: the mean, the factors, then their interactions
    :param error_share: of the total variation that repetitions of one combination show
    :param deviation: standard deviation of the errors
    :param confidence: level of the intervals
    :param multiplicative: whether the responses are logarithms (base 10)
    """

    factors: tuple[str, ...]
    responses: FloatArray
    effects: tuple[Effect, ...]
    error_share: float
    deviation: float
    confidence: float
    multiplicative: bool

    @property
    def fitted(self) -> FloatArray:
        """Predicted response of each combination: with all interactions, its mean."""
        result: FloatArray = self.responses.mean(axis=1)
        return result

    @property
    def residuals(self) -> FloatArray:
        """Float[2^k, r]."""
        result: FloatArray = self.responses - self.fitted[:, None]
        return result

    def checks(self) -> list[str]:
        """
        Whether the errors are what the intervals assume, a sentence each.

        Normal errors (Shapiro and Wilk's test), a spread that does not grow with
        the response, errors that are small beside it, and whether an additive model fits at all.
        """
        residuals = self.residuals.ravel()
        lines = []
        if not residuals.any():
            return ["The repetitions do not differ at all: the intervals have no width."]
        chance = float(stats.shapiro(residuals).pvalue)
        verdict = "look normal" if chance >= 0.05 else "do not look normal"
        lines.append(f"Errors {verdict} (Shapiro-Wilk p = {chance:.2g}).")
        spread = self.responses.std(axis=1, ddof=1)
        if len(spread) > 2 and np.ptp(self.fitted) > 0.0 and np.ptp(spread) > 0.0:
            trend = stats.spearmanr(self.fitted, spread)
            grows = trend.pvalue < 0.05 and trend.statistic > 0.0
            lines.append(
                f"The spread of repetitions {'grows' if grows else 'does not clearly grow'} with "
                f"the response (rank correlation {trend.statistic:+.2f})."
            )
        scale = float(np.abs(self.fitted).max())
        lines.append(
            f"The largest error is {float(np.abs(residuals).max()) / scale:.1%} of the largest "
            "mean response."
        )
        low, high = float(self.responses.min()), float(self.responses.max())
        if not self.multiplicative and low > 0.0 and high / low > MULTIPLICATIVE_RATIO:
            lines.append(
                f"Responses span a factor of {high / low:.0f}: a multiplicative model "
                "(--multiplicative) suits them better."
            )
        return lines


def analyse(
    factors: Sequence[str],
    responses: npt.ArrayLike,
    confidence: float = 0.95,
    multiplicative: bool = False,
) -> Factorial:
    """
    Analyse a 2^k r experiment.

    :param factors: names of the k factors
    :param responses: float[2^k, r] with r of at least 2; in row i, factor j is at its upper level
        if bit j of i is set
    :param confidence: level of the intervals
    :param multiplicative: analyse the logarithms of the responses, which must be positive
    :raises ValueError: if the responses have another shape or cannot be used
    """
    k = len(factors)
    measured = np.asarray(responses, dtype=np.float64)
    if not 1 <= k <= MOST_FACTORS:
        raise ValueError(f"{k} factors; allowed are 1 to {MOST_FACTORS}")
    if measured.ndim != 2 or len(measured) != 2**k or measured.shape[1] < 2:
        shape = " x ".join(map(str, measured.shape))
        raise ValueError(f"responses are {shape}; {k} factors take {2**k} x r, r of at least 2")
    if not np.isfinite(measured).all():
        raise ValueError("a response is not a finite number")
    if multiplicative:
        if measured.min() <= 0.0:
            raise ValueError("a multiplicative model takes positive responses")
        measured = np.log10(measured)
    rows, r = measured.shape
    means = measured.mean(axis=1)
    errors = float(np.sum((measured - means[:, None]) ** 2))
    freedom = rows * (r - 1)
    deviation = math.sqrt(errors / freedom)
    half = float(stats.t.ppf(0.5 + confidence / 2.0, freedom)) * deviation / math.sqrt(rows * r)
    total = float(np.sum((measured - measured.mean()) ** 2))
    levels = np.array([[2 * ((i >> j) & 1) - 1 for j in range(k)] for i in range(rows)])
    effects = []
    for size in range(k + 1):
        for chosen in combinations(range(k), size):
            signs = levels[:, list(chosen)].prod(axis=1)
            value = float(signs @ means) / rows
            share = rows * r * value**2 / total if size and total > 0.0 else 0.0
            name = " × ".join(factors[j] for j in chosen) or "mean"
            column = tuple(int(sign) for sign in signs)
            effects.append(Effect(name, column, value, value - half, value + half, share))
    error_share = errors / total if total > 0.0 else 0.0
    return Factorial(
        tuple(factors),
        measured,
        tuple(effects),
        error_share,
        deviation,
        confidence,
        multiplicative,
    )


def from_table(table: pd.DataFrame, factors: Sequence[str], response: str) -> FloatArray:
    """
    The responses of a tidy table, one run a row, as `analyse` wants them.

    Combinations with more repetitions than others lose the surplus ones, last first.

    :param table: has a column for each factor, with two values each, and the response
    :param factors: names of their columns
    :param response: name of its column
    :raises InputError: one line that names the column or combination at fault
    """
    for column in (*factors, response):
        if column not in table.columns:
            known = ", ".join(map(str, table.columns))
            raise InputError(f"no column {column!r}; the table has {known}")
    values = pd.to_numeric(table[response], errors="coerce")
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0]) + 2
        raise InputError(f"{response}: line {row} is not a number")
    index = np.zeros(len(table), dtype=np.int64)
    levels = []
    for bit, column in enumerate(factors):
        found = sorted(table[column].dropna().unique())
        if len(found) != 2 or table[column].isna().any():
            raise InputError(f"{column}: takes two levels, has {len(found)} {found[:5]}")
        levels.append(found)
        index |= (table[column] == found[1]).to_numpy().astype(np.int64) << bit
    groups = [values[index == row].to_numpy() for row in range(2 ** len(factors))]
    r = min(len(group) for group in groups)
    if r < 2:
        row = next(row for row, group in enumerate(groups) if len(group) < 2)
        where = ", ".join(f"{f}={levels[b][row >> b & 1]}" for b, f in enumerate(factors))
        raise InputError(f"{where}: {len(groups[row])} runs; each combination takes at least 2")
    return np.array([group[:r] for group in groups], dtype=np.float64)


def analyse_file(
    path: Path, factors: Sequence[str], response: str, multiplicative: bool = False
) -> Factorial:
    """
    The effects in a table of a file.

    :param path: a CSV file, see `from_table`
    :param factors: names of its columns
    :param response: name of its column
    :param multiplicative: whether to analyse logarithms
    :raises InputError: one line that names the file and what is wrong with it
    """
    content = read_expanded(path, "a table", MOST_RECORD_BYTES)
    try:
        responses = from_table(pd.read_csv(io.BytesIO(content)), factors, response)
        return analyse(factors, responses, multiplicative=multiplicative)
    except (ValueError, OverflowError) as error:  # one for a number that no float can hold
        raise InputError(f"{path}: {error}") from error


def table_of(result: Factorial) -> Table:
    """
    The effects with intervals and shares, for the terminal.

    :param result: the analysed design
    """
    _, r = result.responses.shape
    unit = " (log10)" if result.multiplicative else ""
    view = Table(box=box.SIMPLE_HEAD, title=f"2^{len(result.factors)} x {r} factorial{unit}")
    view.add_column("factor")
    for column in ("signs", "effect", f"{result.confidence:.0%} interval", "of variation"):
        view.add_column(column, justify="right")
    for effect in result.effects:
        signs = "".join("+" if sign > 0 else "-" for sign in effect.signs)
        note = "" if effect.significant else " (not significant)"
        share = "" if effect.name == "mean" else f"{effect.share:.2%}"
        view.add_row(
            effect.name,
            signs,
            f"{effect.value:.5g}",
            f"{effect.low:.5g} to {effect.high:.5g}{note}",
            share,
        )
    view.add_row("errors", "", f"s = {result.deviation:.4g}", "", f"{result.error_share:.2%}")
    return view


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(prog="python -m training.factorial", description=__doc__.split("\n\n")[0])
    line.add_argument("--csv", type=Path, required=True, help="tidy table, one run a row")
    line.add_argument("--factors", required=True, help="columns with two levels each: A,B,C")
    line.add_argument("--response", required=True, help="column that was measured")
    line.add_argument("--multiplicative", action="store_true", help="analyse logarithms")
    return line


def main() -> None:
    """Analyse a table and print what it shows."""
    given = parser().parse_args()
    with exit_on_bad_input():
        factors = [name for name in given.factors.split(",") if name]
        result = analyse_file(given.csv, factors, given.response, given.multiplicative)
    console = Console(soft_wrap=True)
    console.print(table_of(result))
    for line in result.checks():
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    main()
