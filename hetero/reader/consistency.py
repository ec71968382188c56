"""Checks that all endpoints hold the same data set. Pure: no threads, no network.

The reference is the description (length and fingerprint) of the first endpoint in natural order that can answer. So all
ranks have the same reference. If an endpoint that was present when the reference was chosen differs, the job fails. If
an endpoint that joined later differs, a warning is logged and the endpoint is not used, because the job can continue
without it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from hetero.batches.build import log_warnings
from hetero.batches.fetch import Description
from hetero.errors import DatasetError, DatasetMismatchError, HeteroError, ProtocolMismatchError
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.hedging import Pace
from hetero.reader.receiver_choice import ReceiverChoice
from hetero.spec import DatasetSpec

__all__ = ["ServedDataset"]

logger = logging.getLogger(__name__)


class ServedDataset:
    """One data set on all endpoints: whether they hold the same data, and what was measured of its batches.

    Args:
        spec: The specification.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self.reference: Description | None = None
        """Description of the first endpoint. All others are compared with it. None until that endpoint answers."""
        self.failure: HeteroError | None = None
        """The error to raise if no batch of this data set can be trusted, else None."""
        self.batch_bytes = 64 * 2**20
        """Bytes of the largest recent batch. Before the first batch, 64 MiB: a guess that is rather too large."""
        self._sizes: deque[int] = deque(maxlen=Pace.NUM_OBSERVATIONS)
        """Bytes of the recent batches."""
        self.receiver = ReceiverChoice()
        """Decides whether the consumer itself or a fetcher receives the batches."""
        self.was_served = False
        """Whether an endpoint was ever ready for the data set."""
        self.has_settled = False
        """Whether a caller has already waited for the other endpoints. Later callers need not wait again."""
        self.descriptions: dict[str, Description] = {}
        """Descriptions by the endpoint's id."""
        self.build_s = 0.0
        """Longest time that an endpoint took to prepare, in seconds."""
        self._reference_name = ""
        """Id of the endpoint that gave the reference."""
        self._present_at_choice: set[tuple[str, str]] = set()
        """Identities of the endpoints that were present when the reference was chosen."""
        self._has_warned = False
        """Whether a warning about different environments was logged."""

    def update(self, connections: Sequence[EndpointConnection]) -> None:
        """Choose the reference if an endpoint can give it, and compare the endpoints that have described themselves.

        Args:
            connections: The endpoints in use, in natural order.
        """
        if self.reference is None:
            self._choose_reference(connections)
        if self.reference is None:
            return
        for connection in connections:
            description = connection.descriptions.get(self.spec)
            if description is None:
                continue
            self.descriptions[connection.record.endpoint_id] = description
            was_compared = self.spec in connection.prepared | connection.unusable
            # An endpoint may have become foreign after it sent its description. Such an endpoint is not used.
            if connection.state is ConnectionState.READY and not was_compared:
                self._compare(connection, description, self.reference)

    def observe_size(self, nbytes: int) -> None:
        """Record the size of a batch."""
        self._sizes.append(nbytes)
        self.batch_bytes = max(self._sizes)

    def is_settled(self, connections: Sequence[EndpointConnection]) -> bool:
        """Return whether each endpoint that was present at the choice of the reference is compared or unusable.

        An endpoint that is down is neither. It may be about to come back with the data set
        (`hetero.pool.fork_server`), so the caller waits for it.
        """
        return self.reference is not None and all(
            connection.identity not in self._present_at_choice
            or self.spec in connection.prepared | connection.unusable
            # A foreign endpoint is never used, so it is never compared.
            or connection.state is ConnectionState.FOREIGN
            for connection in connections
        )

    def build_failed(self, connection: EndpointConnection, error: DatasetError) -> None:
        """Record that the user's code raised while an endpoint prepared or described the data set."""
        # Exclude the endpoint for this data set only. In an earlier version, a factory that raised made the endpoint
        # unusable for all data sets.
        self._exclude(connection, error, f"cannot serve {self.spec}: {error}".splitlines()[0])

    def leave_to_others(self, connection: EndpointConnection, others: Iterable[EndpointConnection], why: str) -> bool:
        """Stop using an optional endpoint where a sample raised, if others serve the data set.

        The endpoint may lack files that the data hosts have, although the fingerprints agree. If a data host raises
        too, the sample is to blame.

        Args:
            connection: The endpoint.
            others: The endpoints that this rank uses.
            why: What happened, for the log.

        Returns:
            Whether another endpoint should repeat the batch.
        """
        has_other = any(other is not connection and other.serves(self.spec) for other in others)
        if not (connection.record.is_optional and has_other):
            return False
        if self.spec not in connection.unusable:  # several batches of the endpoint may fail at the same time
            logger.warning(
                "endpoint %s is no longer used, and another one repeats the batch: %s",
                connection.record.endpoint_id,
                why,
            )
        connection.prepared.discard(self.spec)
        connection.mark_unusable(self.spec, why)
        return True

    def has_planned(self, connections: Iterable[EndpointConnection]) -> bool:
        """Return whether one of these endpoints serves the data set and is not optional."""
        return any(each.serves(self.spec) and not each.record.is_optional for each in connections)

    def rejected(self, connection: EndpointConnection, details: str) -> None:
        """Record that an endpoint does not understand a request, because it runs another version of hetero."""
        # The error is a mismatch (HET-11), which no restart can mend. With the error of a damaged batch (HET-35), the
        # job would be restarted.
        why = f"speaks another protocol: {details}"
        advice = "install the same version of hetero on all hosts"
        self._exclude(connection, ProtocolMismatchError(f"{connection.name} {why}\n    {advice}"), why)

    def _choose_reference(self, connections: Sequence[EndpointConnection]) -> None:
        """Set the reference to the first description in natural order, unless an earlier endpoint may still answer."""
        # The job was planned without its optional endpoints. They may lack the data, so they give no reference, unless
        # there are no others.
        for connection in [each for each in connections if not each.record.is_optional] or connections:
            description = connection.descriptions.get(self.spec)
            if description is not None:
                self.reference, self._reference_name = description, connection.record.endpoint_id
                log_warnings(description.warnings)
                # Endpoints are remembered by id and incarnation, because an endpoint that is started again later counts
                # as one that joined later.
                self._present_at_choice = {other.identity for other in connections}
                return
            if self.spec in connection.preparing:
                return  # this endpoint comes first and may still answer

    def _compare(self, connection: EndpointConnection, found: Description, expected: Description) -> None:
        """Use the endpoint for the data set if its description agrees with the reference. Else exclude the endpoint."""
        if (found.num_samples, found.fingerprint) == (expected.num_samples, expected.fingerprint):
            connection.prepared.add(self.spec)
            self.was_served = True
            self._compare_environment(connection, found, expected)
            return
        problem = (
            f"data set {self.spec.name!r} differs between hosts: "
            f"{self._reference_name} has {_outline(expected)}, {connection.record.endpoint_id} has {_outline(found)}. "
            "Check that every data host has all files and lists them in sorted order"
        )
        self._exclude(connection, DatasetMismatchError(problem), problem)

    def _exclude(self, connection: EndpointConnection, error: HeteroError, why: str) -> None:
        """Stop using the endpoint for the data set. Fail the data set unless the endpoint joined later."""
        connection.mark_unusable(self.spec, why)
        is_late = self.reference is not None and connection.identity not in self._present_at_choice
        # An optional endpoint always counts as one that joined later, because the job was planned without it. It joins
        # the job when the job has begun. So the warning "joined later" is true of it, even if it was present when the
        # reference was chosen, which is the description that all endpoints must match.
        if is_late or connection.record.is_optional:
            logger.warning("endpoint %s joined later and is not used: %s", connection.record.endpoint_id, why)
        elif self.failure is None:
            self.failure = error

    def _compare_environment(self, connection: EndpointConnection, found: Description, expected: Description) -> None:
        """Log one warning per data set if the versions of libraries or settings differ between two endpoints."""
        if self._has_warned:
            return
        # Only facts that both endpoints report can differ.
        names = sorted(found.environment.keys() & expected.environment.keys())
        differing = [name for name in names if found.environment[name] != expected.environment[name]]
        if differing:
            self._has_warned = True
            facts = ", ".join(
                f"{name} {expected.environment[name]} and {found.environment[name]}" for name in differing
            )
            logger.warning(
                "endpoints %s and %s differ in %s: the bytes of a sample may depend on where it is computed",
                self._reference_name,
                connection.record.endpoint_id,
                facts,
            )


def _outline(description: Description) -> str:
    length = "no length" if description.num_samples is None else f"{description.num_samples} samples"
    return f"{length} with fingerprint {description.fingerprint[:16]}"
