"""A scheduler on gRPC's own library, in a process of its own, steered by lines of JSON.

Real schedulers use gRPC's own code and not grpclib. It keeps threads for as long as its process
lives, so it is not loaded into the process of the tests, some of which clone::

    python tests/grpcio_peer.py SETTINGS         SETTINGS: {"ca", "cert", "key", "token"} or {}

It first prints {"address": ...}, then one line for each line that it reads:

    {"do": "call", "address", "method", "fields"}    -> {"answer": {...}} or {"status", "message"}
    {"do": "flood", "address", "count", "in_flight"} -> {"failed": [...]}: dispatches, kept channels
    {"do": "ends"}                                   -> {"ends": {id: [status, ...]}}
    {"do": "messages"}                               -> {"messages": [[method, fields, metadata]]}
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from stockade.supervisor.wire import scheduler_pb2 as pb

CONTROL = {
    "RegisterWorker": (pb.RegisterWorkerRequest, pb.RegisterWorkerResponse(accepted=True)),
    "Heartbeat": (pb.HeartbeatRequest, pb.HeartbeatResponse(ok=True)),
    "ReportTaskStatus": (pb.ReportTaskStatusRequest, pb.ReportTaskStatusResponse(ok=True)),
    "AckTask": (pb.AckTaskRequest, pb.AckTaskResponse(ok=True)),
}
EXECUTOR = {
    "ExecuteTask": (pb.ExecuteTaskRequest, pb.ExecuteTaskResponse),
    "CancelTask": (pb.CancelTaskRequest, pb.CancelTaskResponse),
}
DEADLINE_S = 20.0


class Peer:
    def __init__(self, settings: dict[str, str]) -> None:
        self.messages: list[list[Any]] = []
        self._settings = settings
        token = settings.get("token")
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        server = grpc.server(ThreadPoolExecutor(8))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name, answer),
                request_deserializer=request.FromString,
                response_serializer=type(answer).SerializeToString,
            )
            for name, (request, answer) in CONTROL.items()
        }
        service = "scheduler.v1.WorkerControlService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if settings.get("ca"):
            self._ca, self._cert, self._key = (
                Path(settings[name]).read_bytes() for name in ("ca", "cert", "key")
            )
            secured = grpc.ssl_server_credentials(
                [(self._key, self._cert)], self._ca, require_client_auth=True
            )
            port = server.add_secure_port("127.0.0.1:0", secured)
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._server = server
        self.address = f"127.0.0.1:{port}"

    def _handler(self, name: str, answer: Any) -> Any:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            fields = MessageToDict(request, preserving_proto_field_name=True)
            metadata = {item.key: item.value for item in context.invocation_metadata()}
            self.messages.append([name, fields, metadata])
            return answer

        return handle

    def channel(self, address: str) -> grpc.Channel:
        if not self._settings.get("ca"):
            return grpc.insecure_channel(address)
        secured = grpc.ssl_channel_credentials(self._ca, self._key, self._cert)
        return grpc.secure_channel(address, secured)

    def ask(self, channel: grpc.Channel, method: str, fields: dict[str, Any]) -> Any:
        request, answer = EXECUTOR[method]
        call = channel.unary_unary(
            f"/scheduler.v1.ExecutorService/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(ParseDict(fields, request()), timeout=DEADLINE_S, metadata=self._metadata)

    def call(self, address: str, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        with self.channel(address) as channel:
            try:
                answer = self.ask(channel, method, fields)
            except grpc.RpcError as error:
                return {"status": error.code().name, "message": error.details()}
        return {"answer": MessageToDict(answer, always_print_fields_with_no_presence=True)}

    def flood(self, address: str, count: int, in_flight: int) -> dict[str, Any]:
        """Dispatch so many tasks over one kept channel; why some were refused."""
        with self.channel(address) as channel, ThreadPoolExecutor(in_flight) as threads:

            def one(number: int) -> str | None:
                fields = {"schedule_instance_id": f"flood-{number}", "payload": "true"}
                try:
                    self.ask(channel, "ExecuteTask", {"task_type": "shell", **fields})
                except grpc.RpcError as error:
                    return f"{error.code().name}: {error.details()}"
                return None

            failed = [reason for reason in threads.map(one, range(count)) if reason]
        return {"failed": failed}

    def ends(self) -> dict[str, list[str]]:
        """The terminal reports' statuses, by task."""
        found: dict[str, list[str]] = {}
        for method, fields, _ in list(self.messages):
            if method == "ReportTaskStatus" and fields["status"] != "running":
                found.setdefault(fields["schedule_instance_id"], []).append(fields["status"])
        return found

    def close(self) -> None:
        self._server.stop(None).wait()


def main() -> None:
    peer = Peer(json.loads(sys.argv[1]))
    print(json.dumps({"address": peer.address}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        if do == "messages":
            found: dict[str, Any] = {"messages": list(peer.messages)}
        elif do == "ends":
            found = {"ends": peer.ends()}
        else:
            found = {"call": peer.call, "flood": peer.flood}[do](**asked)
        print(json.dumps(found), flush=True)
    peer.close()


if __name__ == "__main__":
    main()
