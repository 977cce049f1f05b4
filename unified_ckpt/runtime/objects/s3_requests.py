"""Sends requests by the SDK's client, again where that may help, in bounded time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.objects.s3_client import Clients, Limits
from unified_ckpt.runtime.objects.s3_errors import EXPIRED, REQUEST_ERRORS, Failure, failure_of
from unified_ckpt.runtime.objects.store import RequestFailedError

_FIRST_ATTEMPTS = 3  # at a host that has never answered: its name may be wrong
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an object, or a listing. `method`: of the SDK's client; `part`: 0 for none."""

    verb: str
    key: str
    method: str
    part: int = 0

    def __str__(self) -> str:
        return f"{self.verb} {self.part}" if self.part else self.verb


class RequestSender:
    """Sends the requests for one bucket. Safe for threads and forks."""

    def __init__(self, url: str, clients: Clients, limits: Limits) -> None:
        self._url, self._bucket = url, url.partition("://")[2]
        self._clients, self._limits = clients, limits
        self._has_answered = False

    def send(self, request: Request, **arguments: object) -> Any:
        """Return the SDK's answer. RequestFailedError if it refuses, or after the last attempt."""
        return self.read(request, lambda answer: answer, **arguments)

    def read(
        self, request: Request, read: Callable[[Any], _Result], **arguments: object
    ) -> _Result:
        """Return what `read` makes of the SDK's answer; a body that ends early is read again."""
        limits = self._limits
        completes = request.method == "complete_multipart_upload"
        read_seconds = limits.complete_seconds if completes else limits.read_seconds
        total_seconds = limits.total_seconds + completes * limits.complete_seconds
        started, is_renewed, attempt = time.monotonic(), False, 0
        while True:
            attempt += 1
            try:
                method = getattr(self._clients.get(read_seconds), request.method)
                result = read(method(Bucket=self._bucket, **arguments))
            except CheckpointError:  # of `read`; NotFoundError is an OSError too
                raise
            except REQUEST_ERRORS as error:
                failure, cause = failure_of(error, request.method), error
            else:
                self._has_answered = True
                return result
            self._has_answered |= failure.has_answer
            seconds = time.monotonic() - started
            if failure.code in EXPIRED and not is_renewed:
                self._clients.renew()
                is_renewed = True
                continue
            delay = random.uniform(0, self._longest_delay(attempt))
            if self._is_last(attempt, failure) or seconds + delay > total_seconds:
                raise self._error(request, failure, attempt, seconds) from cause
            time.sleep(delay)

    def _longest_delay(self, attempt: int) -> float:
        delay = self._limits.first_delay_seconds * 2.0 ** (attempt - 1)
        return min(delay, self._limits.longest_delay_seconds)

    def _is_last(self, attempt: int, failure: Failure) -> bool:
        attempts = self._limits.attempts
        if failure.is_unreachable and not self._has_answered:
            attempts = min(attempts, _FIRST_ATTEMPTS)
        return not failure.is_transient or attempt >= attempts

    def _error(
        self, request: Request, failure: Failure, attempts: int, seconds: float
    ) -> RequestFailedError:
        count = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        place = f"{self._url}/{request.key}".rstrip("/")
        text = f"{place}: {request}: {failure.reason} ({count} in {seconds:.1f} s)"
        return RequestFailedError(text, code=failure.code, attempts=attempts)
