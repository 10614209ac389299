"""What an engine behind HTTP needs to know of its server. Loads no aiohttp."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """base_url: `http://host:port`, with or without `/v1`. model: its name there; empty: the only one that the server has.
    api_key_env: environment variable with the server's key; empty: none."""

    base_url: str
    model: str = ""
    api_key_env: str = ""
    max_num_seqs: int
    """Requests that are sent at once; the others wait here."""
    context_len: int
    """Tokens of prompt plus answer; the server's context must not be shorter."""
    vocab_size: int
    """Of the model that is trained. No id outside of it is ever sent: vLLM dies of one."""
    connect_timeout_s: float = 10.0
    """A server that is there accepts within milliseconds."""
    control_timeout_s: float = 60.0
    """One call about pausing, weights or health."""
    wait_s: float = 30.0
    """At the start: how long a server may refuse connections, as it does while it loads its model."""

    @property
    def root(self) -> str:
        """The address without its path of the OpenAI interface."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
