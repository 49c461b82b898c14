"""A server for programs that are written for Tinker: `turnwise tinker --model PATH`.

The SDK's client connects to TINKER_BASE_URL, and trains and samples adapters of one model. `routes`
has the HTTP side, `service` has the state and the verbs, and `wire` has the messages. `trainer`
calls the trainer's processes, and `backend` starts everything. `ServiceClient` runs client and
server in one program.
"""

from turnwise.tinker.client import ServiceClient

__all__ = ["ServiceClient"]
