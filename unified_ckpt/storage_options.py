"""How to reach a bucket: what a user passes as `storage_options`. Never stored, never shown."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import SecretStr
from pydantic.functional_validators import field_validator, model_validator

from unified_ckpt.base_options import BaseOptions

_ENDPOINT = re.compile(r"https?://[^/\s]+/?")


class StorageOptions(BaseOptions):
    """How to reach a bucket.

    What is not set comes from the SDK's environment: variables such as `AWS_REGION` and
    `AWS_ENDPOINT_URL_S3`, profiles, web identity, and the machine's role. `gs://` takes HMAC keys;
    OAuth tokens, which are Google's default credentials, are not supported.
    """

    _REQUIRES: ClassVar = {"session_token": ("access_key",)}

    endpoint: str | None = None
    """The URL of a store other than AWS, such as "https://minio.example.com:9000"."""
    region: str | None = None
    """The region that requests are signed for."""
    profile: str | None = None
    """The name of a profile in the SDK's configuration files."""
    access_key: SecretStr | None = None
    """The access key, or the access ID of a HMAC key. Set `access_key` and `secret_key` or neither.
    """
    secret_key: SecretStr | None = None
    """The secret of the access key."""
    session_token: SecretStr | None = None
    """The session token of a temporary access key. The key is not refreshed."""
    anonymous: bool = False
    """Signs no request, for public buckets."""
    path_style: bool | None = None
    """Whether URLs name the bucket in the path, not in the host. None does so unless the endpoint
    is that of AWS.
    """

    @field_validator("access_key", "secret_key", "session_token", mode="before")
    @classmethod
    def _hide(cls, value: object) -> object:
        """Hide a value of any type: the error for another type would show it."""
        return value if value is None or isinstance(value, SecretStr) else SecretStr(str(value))

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError('it should be "https://host" or "http://host:port"')
        return value

    @model_validator(mode="after")
    def _check(self) -> StorageOptions:
        if "@" in (self.endpoint or ""):  # errors of the client show the endpoint
            raise ValueError("got a user name in endpoint, expected a host; pass access_key")
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("got one of access_key and secret_key; set both or neither")
        if self.anonymous and (self.access_key or self.profile):
            raise ValueError("got anonymous and credentials, expected one of them")
        if self.profile and self.access_key:
            raise ValueError("got profile and access_key, expected one of them")
        return self
