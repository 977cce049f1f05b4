"""What a failed request means: whether another attempt may help, and what a user has to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from botocore import exceptions as sdk
from botocore import xform_name
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

# What a request may raise. The SDK passes on some errors of the connection below it.
REQUEST_ERRORS = (sdk.BotoCoreError, sdk.ClientError, ResponseParserError, HTTPError, OSError)

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_TRANSIENT = {
    *("BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError"),
    *("OperationAborted", "RequestLimitExceeded", "RequestTimeout", "ServiceUnavailable"),
    *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"),
}
_PERMISSIONS = {  # of AWS, by the SDK's method
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject, and s3:ListBucket to learn that an object is absent",
    "head_object": "s3:GetObject, and s3:ListBucket to learn that an object is absent",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
}
_ADVICE = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "RequestTimeTooSkewed": "this machine's clock is wrong; correct it",
    "InvalidAccessKeyId": "the store does not know the access key; correct it",
    "SignatureDoesNotMatch": "the secret key is wrong, or the region; correct it",
    "AuthorizationHeaderMalformed": "set the bucket's region",
    "PermanentRedirect": "set the bucket's region or endpoint",
    **dict.fromkeys(EXPIRED, "the credentials have expired; renew them"),
}
# Codes that decide what a verb returns, also in the body of an answer whose status is 200.
_FINAL = {"NoSuchUpload", "NoSuchKey", "InvalidPart", "PreconditionFailed", "NotImplemented"}
_CODES = {404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange", 501: "NotImplemented"}
_NO_CREDENTIALS = (
    "got no credentials; set AWS_ACCESS_KEY_ID, a profile or storage_options. gs:// takes HMAC "
    "keys, and no OAuth tokens"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. `code`: the store's, or "" without an answer of the store."""

    reason: str
    code: str = ""
    is_transient: bool = False
    is_unreachable: bool = False  # no connection came about

    @property
    def has_answer(self) -> bool:
        """Whether the store has answered."""
        return bool(self.code)


def failure_of(error: Exception, method: str) -> Failure:
    """Return what an error of the SDK means. `method`: of the client, which raised it."""
    if isinstance(error, sdk.ClientError):
        return _refusal(error, method)
    if isinstance(error, sdk.NoCredentialsError | sdk.PartialCredentialsError):
        return Failure(_NO_CREDENTIALS)
    if isinstance(error, sdk.EndpointConnectionError | sdk.ConnectTimeoutError):
        return Failure(_cause(error), is_transient=True, is_unreachable=True)
    if isinstance(error, sdk.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Failure(f"{error}; AWS_CA_BUNDLE names the file of trusted certificates")
    is_transient = isinstance(
        error,
        sdk.HTTPClientError  # closed connections and late answers too
        | sdk.ConnectionError
        | sdk.IncompleteReadError
        | sdk.CredentialRetrievalError
        | ResponseParserError
        | HTTPError
        | OSError,
    )
    return Failure(_cause(error), is_transient=is_transient)


def _refusal(error: sdk.ClientError, method: str) -> Failure:
    details, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status, code = metadata.get("HTTPStatusCode", 0), str(details.get("Code", ""))
    code = "" if code == str(status) else code  # of an answer without a body
    message = " ".join(str(details.get("Message") or "").split())
    reason = f"HTTP {status} {code}".rstrip() + (f": {message.rstrip('.')}" if message else "")
    if xform_name(error.operation_name) != method:  # of the credentials
        return Failure(f"{error.operation_name}: {reason}", is_transient=status >= 500)
    advice = _ADVICE.get(code, "")
    if code == "AccessDenied" or (status == 403 and not code):
        advice = f"the credentials need {_PERMISSIONS[method]}"
    if method == "head_object" and status == 400 and not code:
        code, advice = "ExpiredToken", "the credentials may have expired; renew them"
    request_id = metadata.get("RequestId")
    texts = [reason, advice, f"request {request_id}" if request_id else ""]
    code = code or _CODES.get(status, f"HTTP {status}")
    is_final = code in _FINAL or code in _ADVICE
    is_transient = code in _TRANSIENT or (not is_final and (status in (408, 429) or status >= 500))
    return Failure("; ".join(filter(None, texts)), code, is_transient)


def _cause(error: BaseException) -> str:
    """Return the SDK's text, and the reason of the operating system, which it leaves out."""
    causes = [each for each in _chain(error) if isinstance(each, OSError) and each.strerror]
    text = str(error) or type(error).__name__
    system = str(causes[-1].strerror) if causes else ""
    return text if not system or system in text else f"{text.rstrip('.')}: {system}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
