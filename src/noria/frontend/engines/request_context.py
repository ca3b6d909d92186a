"""A client's request, as services see it: whose it is, and what is noted of it until it has ended."""

from msgspec import Struct

from noria.frontend.access.quotas import ApiClient
from noria.frontend.access.shares import Share, share_of_user
from noria.frontend.engines.versions.version_choice import RequestVersions
from noria.observe.logs.request_log import RequestLogRecord


class RequestContext(Struct, eq=False):
    """Made when the request's key is known. `client` is who takes turns, as `concurrency_limits.py` names it."""

    request_id: str
    api_client: ApiClient
    client: str
    share: Share  # its share of an engine
    versions: RequestVersions
    log_record: RequestLogRecord
    holds_upload: bool = False  # its body counts among those of which few are in memory at once
    opened_s: float = 0.0  # that it has waited for its checkpoint to be opened

    def name_user(self, user: str | None) -> None:
        """Let the request take the share of `user`, if only its address is known."""
        if user and not self.share.is_named:
            self.share = share_of_user(user)
