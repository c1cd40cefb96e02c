"""A trainer written from ipc/PROTOCOL.md alone, section 2: it shares no code with the node. Run by a test.

    python stranger.py ENDPOINT_FILE TOKEN_FILE

Prints one JSON object: what it was answered, and what came of its jobs.
"""

import array
import json
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request


class Session:
    """Section 2.2: it belongs to the node, not to a connection."""

    def __init__(self, endpoint_file, token_file):
        self.endpoint_file, self.token = Path(endpoint_file), Path(token_file).read_text().strip()  # 2.1
        self.received, self.early = 0, []

    def connect(self):
        url = urlsplit(json.loads(self.endpoint_file.read_text())["url"])
        self.socket = socket.create_connection((url.hostname, url.port), timeout=30)
        self.websocket, self.message, self.early = WSConnection(ConnectionType.CLIENT), b"", []
        self.socket.sendall(self.websocket.send(Request(host=url.netloc, target="/")))
        assert isinstance(next(self.events()), AcceptConnection)
        self.send("SessionHello", version=1, token=self.token, session_id="a stranger's", resume_after=self.received)
        return self.receive()

    def events(self):
        while True:
            yield from self.websocket.events()
            self.websocket.receive_data(self.socket.recv(65_536) or None)

    def send(self, type, **fields):
        frame = msgspec.msgpack.encode({"type": type, **fields})
        self.socket.sendall(self.websocket.send(BytesMessage(data=frame)))

    def receive(self):
        """The next frame: 2.5, heartbeats are answered here; 2.1, it may be several messages' worth of bytes."""
        for event in self.events():
            if isinstance(event, Ping):
                self.socket.sendall(self.websocket.send(event.response()))
            elif isinstance(event, CloseConnection):
                return {"type": "closed", "code": event.code}
            elif isinstance(event, BytesMessage):
                self.message += event.data
                if event.message_finished:
                    frame, self.message = msgspec.msgpack.decode(self.message), b""
                    if frame["type"] != "HeartbeatPing":
                        return frame
                    self.send("HeartbeatPong", nonce=frame["nonce"])

    def receive_until(self, *types):
        """The next frame of these; others are for people, or come in their own time (2.4), as outcomes do."""
        while (frame := self.receive())["type"] not in types:
            assert frame["type"] in {"JobEvent", "HeartbeatPong", "OutcomeFrame"}, frame
            self.early += [frame] if frame["type"] == "OutcomeFrame" else []
        return frame

    def outcome(self):
        frame = self.early.pop(0) if self.early else self.receive_until("OutcomeFrame")
        assert frame["cursor"] == self.received + 1
        self.received = frame["cursor"]
        return frame["outcome"]


def describe(outcome):
    """Section 2.6."""
    arrays = [{name: segment[name] for name in ("token_ids", "logprobs", "loss_mask")} for segment in
              (outcome["trajectory"] or {"segments": []})["segments"]]  # fmt: skip
    for each in arrays:
        token_ids, logprobs = array.array("i", each["token_ids"]), array.array("f", each["logprobs"])
        assert len(token_ids) == len(logprobs) == len(each["loss_mask"])
        assert all((value < 0) == bool(mask) for value, mask in zip(logprobs, each["loss_mask"], strict=True))
    tokens = sum(len(each["loss_mask"]) for each in arrays)
    return {key: outcome[key] for key in ("job_id", "status", "reward", "cause", "error_code")} | {"tokens": tokens}


def job(job_id, **payload):
    return {"job_id": job_id, "instance": {"instance_id": "q", "handler": "math", "payload": payload}, "max_turns": 2}


def main():
    session = Session(*sys.argv[1:])
    said = {"welcome": session.connect()}
    question = {"question": "What is 6 * 7?", "answer": "42"}
    session.send("Submit", request_id=1, jobs=[])  # is not answered
    session.send("Submit", request_id=2, jobs=[job("a", **question), job("b", answer=3), job("c", **question)])
    answers = [session.receive_until("Accepted", "Rejected") for _ in range(3)]
    said["answers"] = [(answer["type"], answer["index"], answer.get("path")) for answer in answers]
    outcomes = [session.outcome()]
    session.socket.close()  # as if the network had gone; nothing was acknowledged
    said["again"] = session.connect()
    session.send("ListJobs", request_id=3)
    left = set(session.receive_until("JobList")["job_ids"])
    while left or session.early:
        outcomes.append(session.outcome())
        left.discard(outcomes[-1]["job_id"])
    session.send("Submit", request_id=4, jobs=[job("a", **question)])
    said["joined"] = session.receive_until("Accepted")["cursor"]  # it has ended, and this is where
    session.send("Ack", cursor=session.received)
    session.send("Cancel", request_id=5, targets=[{"type": "TheseJobs", "job_ids": ["a"]}])
    said["unknown"] = session.receive_until("Cancelled")["unknown"]
    session.socket.sendall(session.websocket.send(CloseConnection(code=1000)))
    said["closed"] = session.receive_until("closed")["code"]
    session.socket.close()
    sys.stdout.write(json.dumps({**said, "outcomes": [describe(outcome) for outcome in outcomes]}))


if __name__ == "__main__":
    main()
