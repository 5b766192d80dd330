"""The test service of gRPC's interoperability specification (grpc/doc/interop-test-descriptions.md) for grpcio: the server
and each case for the client under its name there. testing.rs has the same for our side. peer.py uses this module.
"""

import queue

import grpc

messages, services = grpc.protos_and_services("testing.proto")

ECHO_INITIAL = "x-grpc-test-echo-initial"
ECHO_TRAILING = "x-grpc-test-echo-trailing-bin"
METADATA = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab"))
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
SENT = (27182, 8, 1828, 45904)
ASKED = (31415, 9, 2653, 58979)
CODES = {code.value[0]: code for code in grpc.StatusCode}


def zeros(size):
    return messages.Payload(body=bytes(size))


def ask(sizes, payload, **more):
    parameters = [messages.ResponseParameters(size=size) for size in sizes]
    return messages.StreamingOutputCallRequest(response_parameters=parameters, payload=zeros(payload), **more)


# ---- the server ----


def echo_metadata(context):
    received = dict(context.invocation_metadata())
    if ECHO_INITIAL in received:
        context.send_initial_metadata(((ECHO_INITIAL, received[ECHO_INITIAL]),))
    if ECHO_TRAILING in received:
        context.set_trailing_metadata(((ECHO_TRAILING, received[ECHO_TRAILING]),))


def fail_if_asked(request, context):
    if request.HasField("response_status"):
        context.abort(CODES[request.response_status.code], request.response_status.message)


class TestService(services.TestServiceServicer):
    def EmptyCall(self, request, context):
        return messages.Empty()

    def UnaryCall(self, request, context):
        echo_metadata(context)
        fail_if_asked(request, context)
        return messages.SimpleResponse(payload=zeros(request.response_size))

    def StreamingInputCall(self, requests, context):
        size = sum(len(request.payload.body) for request in requests)
        return messages.StreamingInputCallResponse(aggregated_payload_size=size)

    def StreamingOutputCall(self, request, context):
        yield from self.FullDuplexCall([request], context)

    def FullDuplexCall(self, requests, context):
        echo_metadata(context)
        for request in requests:
            fail_if_asked(request, context)
            for parameters in request.response_parameters:
                yield messages.StreamingOutputCallResponse(payload=zeros(parameters.size))


def add_to(server):
    services.add_TestServiceServicer_to_server(TestService(), server)


# ---- the client ----


class Requests:
    """Sends the requests of a streaming call one at a time."""

    def __init__(self):
        self.queue = queue.SimpleQueue()
        self.send = self.queue.put

    def __iter__(self):
        return iter(self.queue.get, None)

    def finish(self):
        self.queue.put(None)


def ended(code, call):
    """Waits for the end of a call, asserts its status code and returns its message. No response may come before."""
    assert call.code() == code, f"expected {code}, got {call.code()}: {call.details()}"
    return call.details()


def cases(channel):
    stub = services.TestServiceStub(channel)
    large_request = messages.SimpleRequest(response_size=314159, payload=zeros(271828))

    def full_duplex(requests, **options):
        options.setdefault("timeout", 30)
        return stub.FullDuplexCall(iter(requests), **options)

    def comes_back(code, message):
        status = messages.EchoStatus(code=code.value[0], message=message)
        for call in (
            stub.UnaryCall.future(messages.SimpleRequest(response_status=status), timeout=30),
            full_duplex([ask([], 0, response_status=status)]),
        ):
            assert ended(code, call) == message, call.details()

    def empty_unary():
        assert stub.EmptyCall(messages.Empty(), timeout=30) == messages.Empty()

    def large_unary():
        assert stub.UnaryCall(large_request, timeout=30).payload == zeros(314159)

    def client_streaming():
        requests = (messages.StreamingInputCallRequest(payload=zeros(size)) for size in SENT)
        assert stub.StreamingInputCall(requests, timeout=30).aggregated_payload_size == 74922

    def server_streaming():
        responses = stub.StreamingOutputCall(ask(ASKED, 0), timeout=30)
        assert [len(response.payload.body) for response in responses] == list(ASKED)

    def ping_pong():
        requests = Requests()
        responses = full_duplex(requests)
        for asked, sent in zip(ASKED, SENT):
            requests.send(ask([asked], sent))
            assert next(responses).payload == zeros(asked)
        requests.finish()
        assert list(responses) == [] and responses.code() == grpc.StatusCode.OK

    def empty_stream():
        responses = full_duplex([])
        assert list(responses) == [] and responses.code() == grpc.StatusCode.OK

    def timeout_on_sleeping_server():
        requests = Requests()
        responses = full_duplex(requests, timeout=0.001)
        requests.send(ask([], SENT[0]))
        ended(grpc.StatusCode.DEADLINE_EXCEEDED, responses)
        requests.finish()

    def cancel_after_begin():
        requests = Requests()
        response = stub.StreamingInputCall.future(iter(requests), timeout=30)
        response.cancel()
        ended(grpc.StatusCode.CANCELLED, response)
        requests.finish()

    def cancel_after_first_response():
        requests = Requests()
        responses = full_duplex(requests)
        requests.send(ask(ASKED[:1], SENT[0]))
        assert next(responses).payload == zeros(ASKED[0])
        responses.cancel()
        ended(grpc.StatusCode.CANCELLED, responses)
        requests.finish()

    def status_code_and_message():
        comes_back(grpc.StatusCode.UNKNOWN, "test status message")
        # This is beyond the specification: each code must arrive as itself.
        for code in grpc.StatusCode:
            if code != grpc.StatusCode.OK:
                comes_back(code, "")

    def special_status_message():
        comes_back(grpc.StatusCode.UNKNOWN, SPECIAL)

    def unimplemented_method():
        ended(grpc.StatusCode.UNIMPLEMENTED, stub.UnimplementedCall.future(messages.Empty(), timeout=30))

    def unimplemented_service():
        nowhere = services.UnimplementedServiceStub(channel)
        ended(grpc.StatusCode.UNIMPLEMENTED, nowhere.UnimplementedCall.future(messages.Empty(), timeout=30))

    def custom_metadata():
        unary = stub.UnaryCall.future(large_request, metadata=METADATA, timeout=30)
        assert len(unary.result().payload.body) == 314159
        streaming = full_duplex([ask([314159], 271828)], metadata=METADATA)
        assert [len(response.payload.body) for response in streaming] == [314159]
        for call in (unary, streaming):
            assert METADATA[0] in [tuple(entry) for entry in call.initial_metadata()], call.initial_metadata()
            assert METADATA[1] in [tuple(entry) for entry in call.trailing_metadata()], call.trailing_metadata()

    return [
        empty_unary,
        large_unary,
        client_streaming,
        server_streaming,
        ping_pong,
        empty_stream,
        timeout_on_sleeping_server,
        cancel_after_begin,
        cancel_after_first_response,
        status_code_and_message,
        special_status_message,
        unimplemented_method,
        unimplemented_service,
        custom_metadata,
    ]
