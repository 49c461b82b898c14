"""A server for programs that are written for Tinker: `turnwise tinker --model PATH`.

The SDK's client (TINKER_BASE_URL) trains and samples adapters of one model here. `routes` has the
HTTP side, `service` the state and the verbs, `wire` the messages; `rank` computes in the trainer's
process, `backend` starts everything. `ServiceClient` does all of it in one program.
"""

from turnwise.tinker.client import ServiceClient

__all__ = ["ServiceClient"]
