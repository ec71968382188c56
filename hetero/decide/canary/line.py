"""Fits a line through canary runs and draws what it predicts for the whole. Pure.

A figure of run i with the fraction x_i of the data is modelled as

    y_i = (a + b x_i^p) (1 + e_i),     e_i ~ N(0, phi (1 + (t / y_i)^2))

* a is the fixed part, b the growing part of the whole, and neither is negative.
* p is 1 if the figure grows in proportion to the data. Sorting, longer searches, and caches that no longer hold the
  data change p a little, which canaries of a few percent hardly show. The prior of p is N(1, curvature^2).
* The noise has a part that is proportional to the value, and an absolute part t. Its scale phi has an inverse gamma
  prior. Otherwise three replicates that agree by chance would give an interval of zero.

a, b and phi have a closed posterior for each p (normal, inverse gamma), and p is on a grid. The forecast is a set of
draws. Sums, costs and comparisons of candidates are then arithmetic on draws, and a probability is a share of draws.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.decide.studies.statistics import f_tail

__all__ = [
    "NUM_DRAWS",
    "Exponent",
    "Form",
    "Line",
    "Noise",
    "Posterior",
    "constant_draws",
    "fit_line",
    "fit_ratio",
    "interval",
    "num_distinct",
]

Array = npt.NDArray[np.float64]

NUM_DRAWS = 4000
"""Draws of every figure. Their 5 and 95 % quantiles end an interval."""
_GRID = np.linspace(-3.0, 3.0, 25)
"""Exponents of the grid, in standard deviations of their prior."""
_EXPONENTS = np.linspace(0.025, 3.0, 120)
"""Exponents for the test of linearity, without a prior. With 0, the growing part would be a second fixed part."""
_MAX_TRIES = 6
_TYPICAL = 0.8
"""Share of the root mean square of the residuals that is not a sign of outliers."""
_TAIL = 4.0
"""Degrees of freedom of the noise, for the weights of outliers. Runs within two standard deviations count fully."""


class Form(enum.Enum):
    """What is known of a line's parts."""

    BOTH = "a fixed and a growing part"
    THROUGH_ORIGIN = "no fixed part"
    MAYBE_ORIGIN = "a fixed part that is as likely as none"
    MAYBE_CONSTANT = "a growing part that is as likely as none"
    MOSTLY_CONSTANT = "a growing part that one figure of a hundred has"


class Columns(enum.Enum):
    """The columns of one model."""

    FIXED = "a"
    GROWING = "b"
    BOTH = "a and b"


_ONE_PART_OF = {
    Form.MAYBE_ORIGIN: Columns.GROWING,
    Form.MAYBE_CONSTANT: Columns.FIXED,
    Form.MOSTLY_CONSTANT: Columns.FIXED,
}
"""The part that a line may have alone, for each form that allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What is known of the noise before any run."""

    relative: float
    """Standard deviation as a share of the value."""
    absolute: float
    """Standard deviation that does not depend on the value, in its unit."""
    degrees: float = 3.0
    """Weight of this knowledge, in degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponent:
    """The exponent p that the runs alone suggest, without a prior."""

    best: float
    low: float
    """End of the 98 % interval. A job has several lines, and one of twenty must not be refused by chance."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A fitted line."""

    mean_draws: Array
    """Draws of the mean of the whole."""
    run_draws: Array
    """Draws of one run of the whole, with the noise of a run."""
    fixed_draws: Array
    """Draws of the fixed part a."""
    growth: float
    """Growing part of the whole, b, divided by its standard error. Small if the figure does not grow measurably."""
    exponent: Exponent | None
    """None if there are too few different fractions, or if a constant is the better forecast."""
    lack_of_fit: float | None
    """Probability of replicates that agree at least this much better than the line, if a line is right. None without
    replicates or with fewer than three different fractions."""


def fit_line(
    x: Sequence[float],
    y: Sequence[float],
    random: np.random.Generator,
    *,
    noise: Noise,
    curvature: float,
    form: Form = Form.BOTH,
) -> Line:
    """Fit a line with noise, and draw what it predicts for the whole, where x is 1.

    The model is ``y = (a + b x^p) (1 + e)`` with a fixed part a and a growing part b. The variance of the noise e is
    ``phi (1 + (t / y)^2)``, where phi is its scale.

    Args:
        x: Fractions of the whole, in (0, 1], at least two runs.
        y: Figures, at least 0.
        random: Generator of the draws.
        noise: Prior of the noise.
        curvature: Standard deviation of the exponent's prior. 0 fixes it to 1.
        form: Which parts the line has.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    # The growing column is 1 at the centre of the fractions, so both columns have about the same size.
    centre = float(np.exp(np.mean(np.log(xs))))
    # This is the t of the model. A figure of this size has equal relative and absolute noise.
    t = noise.absolute / noise.relative
    columns = Columns.GROWING if form is Form.THROUGH_ORIGIN else Columns.BOTH
    variances = ys**2 + t**2
    # The fit needs the variances, and the variances need the fitted values. So compute them alternately. Variances
    # from the runs' own values would let an outlier choose its weight.
    for _ in range(5):
        fitted = _Normal(xs, ys, variances, centre, exponent=1.0, noise=noise, columns=columns).fitted
        # The second term keeps the variances above 0, even if all figures and the absolute noise are 0.
        variances = np.maximum(fitted, 0.0) ** 2 + max(t, 1e-9 * float(np.max(ys, initial=1e-12))) ** 2
        variances = variances * _outlier_factors(ys - fitted, variances, noise)

    def model_of(exponent: float, columns: Columns) -> _Normal:
        return _Normal(xs, ys, variances, centre, exponent, noise, columns)

    def draws_of(columns: Columns) -> tuple[Array, ...]:
        """Return `NUM_DRAWS` draws of the fixed part, of the growing part, and of phi."""
        # The more probable the runs make an exponent of the grid, the more draws have this exponent.
        exponents = 1.0 + curvature * _GRID if curvature > 0 else np.ones(1)
        log_prior = -(_GRID**2) / 2 if curvature > 0 else np.zeros(1)
        models = [model_of(float(exponent), columns) for exponent in exponents]
        shares = _softmax(np.asarray([model.log_evidence for model in models]) + log_prior)
        counts = random.multinomial(NUM_DRAWS, shares)
        drawn = [model.draw(int(num), random) for model, num in zip(models, counts, strict=True) if num]
        # Mix the draws of all exponents, because two figures are compared draw by draw.
        order = random.permutation(NUM_DRAWS)
        return tuple(np.concatenate(column)[order] for column in zip(*drawn, strict=True))

    fixed, growing, phis = draws_of(columns)
    straight = model_of(1.0, columns)
    # Some forms also allow a line with one part. Then replace some of the draws by draws of that line. The better that
    # line describes the runs, the more draws are replaced.
    if form in _ONE_PART_OF:
        one_part = _ONE_PART_OF[form]
        # Logarithm of the odds of both parts against one. By the Bayesian information criterion, the second part must
        # raise the log likelihood by log(n) / 2.
        log_odds = straight.log_likelihood - model_of(1.0, one_part).log_likelihood - math.log(len(xs)) / 2
        if form is Form.MOSTLY_CONSTANT:
            # Before the runs are seen, a line with both parts has a probability of one in a hundred.
            log_odds -= math.log(99)
        # The exponential of larger odds would overflow.
        is_one_part = random.random(NUM_DRAWS) < 1 / (1 + math.exp(min(50.0, log_odds)))
        pairs = zip(draws_of(one_part), (fixed, growing, phis), strict=True)
        fixed, growing, phis = (np.where(is_one_part, one, both) for one, both in pairs)
    # The forecast is about one run of the whole. So the noise of one run is added to the doubt about the mean.
    means = fixed + growing
    spread = np.sqrt(phis * (means**2 + t**2))
    return Line(
        mean_draws=means,
        run_draws=np.maximum(0.0, means + spread * random.standard_normal(NUM_DRAWS)),
        fixed_draws=fixed,
        growth=straight.growth(),
        exponent=_exponent(x, model_of, columns),
        lack_of_fit=_lack_of_fit(xs, ys, variances, straight),
    )


def fit_ratio(x: Sequence[float], y: Sequence[float], at: Array, random: np.random.Generator, *, noise: Noise) -> Array:
    """Return draws of a figure of the whole that grows with another figure, such as CPU seconds with seconds.

    Args:
        x: The other figure of each run, above 0.
        y: The figure of each run.
        at: `NUM_DRAWS` draws of the other figure for the whole.
        random: Generator of the draws.
        noise: Prior of the noise.
    """
    # A line needs shares of a whole, which is here the median of the other figure.
    median = float(np.median(at))
    shares = [value / median for value in x]
    line = fit_line(shares, y, random, noise=noise, curvature=0.0, form=Form.MAYBE_ORIGIN)
    # The line ends at the median of the other figure. Scale its growing part to each draw of the other figure.
    return np.asarray(line.fixed_draws + (line.run_draws - line.fixed_draws) * at / median)


def constant_draws(values: Sequence[float], random: np.random.Generator, *, noise: Noise) -> Array:
    """Return draws of one more value of a figure that does not depend on the data."""
    ys = np.asarray(values, dtype=float)
    # All runs have the same expected value, so they have the same variance. By the model of `fit_line`, it is phi times
    # this number, where phi is the scale of the noise.
    variance = float(np.mean(ys)) ** 2 + (noise.absolute / noise.relative) ** 2
    # A model with the fixed part alone does not use the fractions, their centre and the exponent.
    fractions, variances = np.ones(len(ys)), np.full(len(ys), variance)
    model = _Normal(fractions, ys, variances, centre=1.0, exponent=1.0, noise=noise, columns=Columns.FIXED)
    means, _, noise_scales = model.draw(NUM_DRAWS, random)
    spread = np.sqrt(noise_scales * variance)
    return np.asarray(np.maximum(0.0, means + spread * random.standard_normal(NUM_DRAWS)))


def num_distinct(fractions: Sequence[float]) -> int:
    """Return how many fractions differ by a tenth or more.

    Fractions of replicates differ by less. They are not equal, because files are whole.
    """
    ordered = sorted(fractions)
    count, last = 0, 0.0
    for fraction in ordered:
        if fraction >= 1.1 * last:
            count, last = count + 1, fraction
    return count


def interval(draws: Array, coverage: float = 0.9) -> tuple[float, float, float]:
    """Return the median and the ends of the interval that contains this share of the draws."""
    tail = (1 - coverage) / 2
    low, middle, high = np.quantile(draws, [tail, 0.5, 1 - tail])
    return float(middle), float(low), float(high)


class Posterior:
    """The posterior of the coefficients of a linear model and of the scale phi of its noise: normal, inverse gamma.

    Args:
        design: A row for each run, a column for each coefficient.
        y: Figure of each run.
        variances: Variance of the noise of each run, relative to phi.
        noise: Prior of the noise.
    """

    def __init__(self, design: Array, y: Array, variances: Array, noise: Noise) -> None:
        num_runs, num_columns = design.shape
        self.variances = variances
        # Divide each run by its standard deviation. Then all runs have equal noise, as least squares needs.
        weights = 1 / np.sqrt(variances)
        weighted, target = design * weights[:, None], y * weights
        precision = weighted.T @ weighted
        # Add a little to the diagonal, because with equal fractions the matrix would be singular.
        precision += np.eye(num_columns) * 1e-12 * float(np.trace(precision))
        self.covariance = np.linalg.inv(precision)
        self.best = self.covariance @ weighted.T @ target
        self.fitted = design @ self.best
        residuals = target - weighted @ self.best
        self.squares = float(residuals @ residuals)
        """Weighted sum of the squares of the residuals."""
        # The posterior of phi, the scale of the noise, is an inverse gamma distribution with this shape and this rate.
        # `noise.degrees` is the weight of the prior, as a number of runs.
        prior_squares = noise.degrees * noise.relative**2
        self.shape = (noise.degrees + max(0, num_runs - num_columns)) / 2
        self.rate = (prior_squares + self.squares) / 2
        _, log_det = np.linalg.slogdet(precision)
        self.log_evidence = -0.5 * float(log_det) - self.shape * math.log(self.rate)
        """Logarithm of the probability of the runs, over all coefficients. It compares models with the same columns,
        because the prior of a coefficient is flat."""
        self.log_likelihood = -(noise.degrees + num_runs) / 2 * math.log(prior_squares + self.squares)
        """Logarithm of the probability of the runs with the best coefficients. It compares models with any columns."""

    def draw_phis(self, num: int, random: np.random.Generator) -> Array:
        """Return draws of phi, the scale of the noise."""
        return np.asarray(self.rate / random.gamma(self.shape, size=num))

    def draw_positive(self, num: int, random: np.random.Generator) -> tuple[Array, Array]:
        """Draw the coefficients of the model, and phi, the scale of its noise.

        Draws with a negative coefficient are left out, so there may be no draws at all.

        Args:
            num: Number of draws before some are left out.
            random: Generator of the draws.

        Returns:
            A row of coefficients for each draw, and phi of each draw.
        """
        phis = self.draw_phis(num, random)
        normal = random.standard_normal((num, len(self.best))) @ np.linalg.cholesky(self.covariance).T
        betas = self.best + np.sqrt(phis)[:, None] * normal
        is_positive = (betas >= 0).all(axis=1)
        return betas[is_positive], phis[is_positive]


class _Normal(Posterior):
    """The posterior of (a, b, phi) for one exponent. The growing column is 1 at the centre of the fractions."""

    def __init__(
        self, x: Array, y: Array, variances: Array, centre: float, exponent: float, noise: Noise, columns: Columns
    ) -> None:
        # `draw` needs the posterior of the same runs with a single column.
        self._with_columns = functools.partial(_Normal, x, y, variances, centre, exponent, noise)
        self._columns = columns
        fixed, growing = np.ones(len(x)), (x / centre) ** exponent
        # Value of the growing column for the whole, where x is 1: (1 / centre)^p.
        self._growing_at_whole = centre**-exponent
        parts = {Columns.FIXED: [fixed], Columns.GROWING: [growing], Columns.BOTH: [fixed, growing]}[columns]
        super().__init__(np.stack(parts, axis=1), y, variances, noise)

    def growth(self) -> float:
        """Return the growing part divided by its standard error. The growing part is the last coefficient."""
        # The covariance is relative to the scale of the noise, which is about rate / shape.
        error = math.sqrt(self.rate / self.shape * float(self.covariance[-1, -1]))
        return float(self.best[-1]) / max(error, 1e-300)

    def draw(self, num: int, random: np.random.Generator) -> tuple[Array, Array, Array]:
        """Return draws of a (the fixed part), b (the growing part of the whole) and phi (the scale of the noise).

        Neither a nor b is negative.
        """
        found: list[tuple[Array, Array]] = []
        num_left = num
        for _ in range(_MAX_TRIES):
            # Draw four times the needed number, because draws with a negative part are rejected.
            betas, phis = self.draw_positive(4 * num_left, random)
            found.append((betas[:num_left], phis[:num_left]))
            num_left -= len(found[-1][0])
            if num_left <= 0:
                break
        has_both = self._columns is Columns.BOTH
        # In a model with one part, the part is near zero if nearly all draws are negative. Take the best value instead.
        if num_left > 0 and not has_both:
            best = np.maximum(0.0, np.tile(self.best, (num_left, 1)))
            found.append((best, self.draw_phis(num_left, random)))
        betas, phis = (np.concatenate(column) for column in zip(*found, strict=True))
        zeros = np.zeros(len(betas))
        fixed = zeros if self._columns is Columns.GROWING else betas[:, 0]
        growing = zeros if self._columns is Columns.FIXED else betas[:, -1] * self._growing_at_whole
        # In a model with both parts, the smaller part is zero if nearly all draws have a negative part. Draw the larger
        # part alone.
        if num_left > 0 and has_both:
            larger_alone = self._with_columns(Columns.GROWING if self.best[0] <= self.best[1] else Columns.FIXED)
            rest = larger_alone.draw(num_left, random)
            fixed, growing, phis = (np.concatenate(pair) for pair in zip((fixed, growing, phis), rest, strict=True))
        return fixed, growing, phis


def _outlier_factors(residuals: Array, variances: Array, noise: Noise) -> Array:
    """Return a factor of each run's variance, 1 or more.

    A run far from the line has a larger factor, so it counts less, as if the noise had Student's t distribution.

    Args:
        residuals: Distance of each run from the line.
        variances: Variance of each run.
        noise: Prior of the noise.
    """
    scores = np.abs(residuals) / np.sqrt(variances)
    # The scale is the standard deviation of usual runs: 1.4826 times the median. The median of few residuals is often
    # too small, and usual runs would then count as outliers. Therefore bound the scale from below.
    num_line_parts = 2
    mean_square = float(np.sum(scores**2)) / max(1, len(scores) - num_line_parts)
    scale = max(noise.relative, 1.4826 * float(np.median(scores)), _TYPICAL * math.sqrt(mean_square))
    # Student's t distribution gives a run a weight in proportion to 1 / (_TAIL + score^2). The factor is the inverse of
    # this weight, divided by the inverse at two standard deviations. So runs within these have the factor 1.
    return np.maximum(1.0, (_TAIL + (scores / scale) ** 2) / (_TAIL + 2.0**2))


def _softmax(values: Array) -> Array:
    weights = np.exp(values - np.max(values))
    return np.asarray(weights / np.sum(weights))


def _exponent(x: Sequence[float], model_of: Callable[[float, Columns], _Normal], columns: Columns) -> Exponent | None:
    """Return the exponent that the runs alone suggest. None if a constant forecasts them better, or fractions are few.

    Args:
        x: Fraction of each run.
        model_of: Returns the posterior for an exponent and columns.
        columns: Which parts the line has.
    """
    # An exponent needs one fraction more than the line has parts.
    if num_distinct(x) < (2 if columns is Columns.GROWING else 3):
        return None
    models = [model_of(float(exponent), columns) for exponent in _EXPONENTS]
    # The first coefficient of a model with both parts is the fixed part. If it is negative, leave the fixed part out.
    models = [
        model if model.best[0] >= 0 else model_of(float(exponent), Columns.GROWING)
        for exponent, model in zip(_EXPONENTS, models, strict=True)
    ]
    # The last coefficient is the growing part. An exponent without growth is not possible.
    is_possible = np.asarray([bool(model.best[-1] > 0) for model in models])
    log_likelihoods = np.where(is_possible, [model.log_likelihood for model in models], -np.inf)
    # A line has two parameters more than a constant: the growing part and its exponent. By the Bayesian information
    # criterion, each of them must raise the log likelihood by log(n) / 2. Otherwise a constant is the better forecast.
    if columns is Columns.BOTH:
        constant = model_of(1.0, Columns.FIXED).log_likelihood
        if float(np.max(log_likelihoods)) - constant < math.log(len(x)):
            return None
    if not is_possible.any():
        return None
    shares = _softmax(log_likelihoods)
    cumulative = np.cumsum(shares)
    # The sum of all shares may be a rounding error below 0.99 or 1, so keep the index within the grid.
    last = len(cumulative) - 1
    low, high = (_EXPONENTS[min(last, int(np.searchsorted(cumulative, quantile)))] for quantile in (0.01, 0.99))
    return Exponent(best=float(_EXPONENTS[int(np.argmax(shares))]), low=float(low), high=float(high))


def _lack_of_fit(x: Array, y: Array, variances: Array, line: _Normal) -> float | None:
    """Return the p-value of the F test for lack of fit. None without enough replicates or fractions.

    The test compares the residuals of the line with the pure error of the replicates. The pure error is how much the
    runs with equal fractions differ from each other.
    """
    # Replicates: runs whose fractions differ by about a percent at most.
    groups: dict[float, list[int]] = defaultdict(list)
    for index, value in enumerate(x):
        groups[round(math.log(value), 2)].append(index)
    num_parameters = len(line.best)
    degrees_fit, degrees_error = len(groups) - num_parameters, len(x) - len(groups)
    if degrees_fit < 1 or degrees_error < 2:
        return None
    pure_squares = 0.0
    for members in groups.values():
        # The fractions of replicates are only nearly equal, so compare their distances from the line.
        residuals = (y[members] - line.fitted[members]) / np.sqrt(variances[members])
        pure_squares += float(np.sum((residuals - np.mean(residuals)) ** 2))
    if pure_squares <= 0:
        return None
    ratio = max(0.0, line.squares - pure_squares) / degrees_fit / (pure_squares / degrees_error)
    return f_tail(ratio, degrees_fit, degrees_error)
