//! The test service of gRPC's interoperability specification
//! (`grpc/doc/interop-test-descriptions.md`) for our side: the messages of `testing.proto`, our
//! server's methods, and each case for our client. `testing.py` has the same for grpcio,
//! `tonic_testing.rs` for tonic.

use std::sync::mpsc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use prost::Message;
use rpc::grpc::{
    Call, CallOptions, Channel, Code, Metadata, Receiver, Requests, Responses, Router, Sender,
    Status,
};

use super::super::{soon, within};

pub const ECHO_INITIAL: &str = "x-grpc-test-echo-initial";
pub const ECHO_TRAILING: &str = "x-grpc-test-echo-trailing-bin";
pub const INITIAL: &str = "test_initial_metadata_value";
pub const TRAILING: &[u8] = &[0xab; 3];
/// `special_status_message`.
pub const SPECIAL: &str = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";
/// `client_streaming`: the sizes of the requests.
pub const SENT: [usize; 4] = [27182, 8, 1828, 45904];
/// `server_streaming` and `ping_pong`: the sizes of the responses.
pub const ASKED: [i32; 4] = [31415, 9, 2653, 58979];
pub const LARGE_REQUEST: usize = 271_828;
pub const LARGE_RESPONSE: i32 = 314_159;
/// Maximum size of a response; no case asks for more.
pub const MOST: i32 = 1 << 20;

// ---- messages ----

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Payload {
    #[prost(bytes = "vec", tag = "2")]
    pub body: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct EchoStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SimpleRequest {
    #[prost(int32, tag = "2")]
    pub response_size: i32,
    #[prost(message, optional, tag = "3")]
    pub payload: Option<Payload>,
    #[prost(message, optional, tag = "7")]
    pub response_status: Option<EchoStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SimpleResponse {
    #[prost(message, optional, tag = "1")]
    pub payload: Option<Payload>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StreamingInputCallRequest {
    #[prost(message, optional, tag = "1")]
    pub payload: Option<Payload>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StreamingInputCallResponse {
    #[prost(int32, tag = "1")]
    pub aggregated_payload_size: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ResponseParameters {
    #[prost(int32, tag = "1")]
    pub size: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StreamingOutputCallRequest {
    #[prost(message, repeated, tag = "2")]
    pub response_parameters: Vec<ResponseParameters>,
    #[prost(message, optional, tag = "3")]
    pub payload: Option<Payload>,
    #[prost(message, optional, tag = "7")]
    pub response_status: Option<EchoStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StreamingOutputCallResponse {
    #[prost(message, optional, tag = "1")]
    pub payload: Option<Payload>,
}

/// Returns a payload of `size` zeros.
pub fn zeros(size: usize) -> Option<Payload> {
    Some(Payload {
        body: vec![0; size],
    })
}

/// Returns the number of bytes in a payload.
pub fn size(payload: &Option<Payload>) -> usize {
    payload.as_ref().map_or(0, |payload| payload.body.len())
}

/// Returns the payload that a request asks for; `None` if the size is not possible.
pub fn asked_for(size: i32) -> Option<Payload> {
    (0..=MOST).contains(&size).then(|| zeros(size as usize))?
}

pub fn large_request() -> SimpleRequest {
    SimpleRequest {
        response_size: LARGE_RESPONSE,
        payload: zeros(LARGE_REQUEST),
        response_status: None,
    }
}

/// Returns a request for responses of these sizes.
pub fn ask(sizes: &[i32], payload: usize) -> StreamingOutputCallRequest {
    let response_parameters = sizes
        .iter()
        .map(|&size| ResponseParameters { size })
        .collect();
    StreamingOutputCallRequest {
        response_parameters,
        payload: zeros(payload),
        response_status: None,
    }
}

pub fn ask_to_fail(code: i32, message: &str) -> Option<EchoStatus> {
    Some(EchoStatus {
        code,
        message: message.to_owned(),
    })
}

pub fn test_method(method: &str) -> String {
    format!("/grpc.testing.TestService/{method}")
}

// ---- our server ----

/// A handler's view of a call that its client cancelled.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// `StreamingInputCall` began.
    Begun,
    /// The end of the requests will not come.
    BrokenInput(Code),
    /// `FullDuplexCall` had sent responses, and the end of the requests will not come.
    BrokenAfterResponse(Code),
}

/// Waits for this event and drops all earlier ones.
pub fn wait_for(seen: &mpsc::Receiver<Seen>, expected: Seen) {
    let within = Duration::from_secs(30);
    while seen
        .recv_timeout(within)
        .unwrap_or_else(|_| panic!("{expected:?} was not seen"))
        != expected
    {}
}

/// Adds the test service. `seen` gets the events of cancelled calls.
pub fn add(router: Router, seen: mpsc::Sender<Seen>) -> Router {
    let seen_input = seen.clone();
    router
        .unary(&test_method("EmptyCall"), |_: &Call, request: Empty| {
            Ok(request)
        })
        .unary(
            &test_method("UnaryCall"),
            |call: &Call, request: SimpleRequest| {
                echo_metadata(call)?;
                fail_if_asked(&request.response_status)?;
                Ok(SimpleResponse {
                    payload: Some(asked_for(request.response_size).ok_or_else(nonsense)?),
                })
            },
        )
        .client_streaming(
            &test_method("StreamingInputCall"),
            move |_: &Call, requests| {
                // In most tests there is no receiver.
                let _ = seen_input.send(Seen::Begun);
                sum(requests)
                    .inspect_err(|status| drop(seen_input.send(Seen::BrokenInput(status.code()))))
            },
        )
        .server_streaming(
            &test_method("StreamingOutputCall"),
            |call: &Call, request, responses: &mut Sender<_>| {
                echo_metadata(call)?;
                respond(&request, responses, &mut 0)
            },
        )
        .streaming(
            &test_method("FullDuplexCall"),
            move |call: &Call, requests, responses: &mut Sender<_>| {
                echo_metadata(call)?;
                let mut sent = 0;
                for request in requests {
                    let served =
                        request.and_then(|request| respond(&request, responses, &mut sent));
                    if let Err(status) = &served
                        && sent > 0
                    {
                        let _ = seen.send(Seen::BrokenAfterResponse(status.code()));
                    }
                    served?;
                }
                Ok(())
            },
        )
}

fn sum(
    requests: &mut Receiver<StreamingInputCallRequest>,
) -> Result<StreamingInputCallResponse, Status> {
    let sum = requests.try_fold(0, |sum, request| {
        Ok::<usize, Status>(sum + size(&request?.payload))
    })?;
    Ok(StreamingInputCallResponse {
        aggregated_payload_size: sum as i32,
    })
}

fn respond(
    request: &StreamingOutputCallRequest,
    responses: &mut Sender<StreamingOutputCallResponse>,
    sent: &mut u32,
) -> Result<(), Status> {
    fail_if_asked(&request.response_status)?;
    request
        .response_parameters
        .iter()
        .try_for_each(|parameters| {
            let payload = Some(asked_for(parameters.size).ok_or_else(nonsense)?);
            responses.send(&StreamingOutputCallResponse { payload })?;
            *sent += 1;
            Ok(())
        })
}

fn nonsense() -> Status {
    Status::new(
        Code::InvalidArgument,
        format!("a response has between 0 and {MOST} bytes"),
    )
}

/// "Echo Metadata" of the specification.
fn echo_metadata(call: &Call) -> Result<(), Status> {
    if let Some(value) = call.metadata().get(ECHO_INITIAL) {
        let mut headers = Metadata::new();
        headers.insert(ECHO_INITIAL, value)?;
        call.set_headers(headers);
    }
    if let Some(value) = call.metadata().get(ECHO_TRAILING) {
        let mut trailers = Metadata::new();
        trailers.insert(ECHO_TRAILING, value)?;
        call.set_trailers(trailers);
    }
    Ok(())
}

/// "Echo Status" of the specification.
fn fail_if_asked(status: &Option<EchoStatus>) -> Result<(), Status> {
    let Some(status) = status else { return Ok(()) };
    let unknown = || {
        Status::new(
            Code::InvalidArgument,
            format!("no status has the code {}", status.code),
        )
    };
    let code = ERRORS
        .into_iter()
        .find(|&code| code as i32 == status.code)
        .ok_or_else(unknown)?;
    Err(Status::new(code, status.message.clone()))
}

/// All codes except OK.
const ERRORS: [Code; 16] = [
    Code::Cancelled,
    Code::Unknown,
    Code::InvalidArgument,
    Code::DeadlineExceeded,
    Code::NotFound,
    Code::AlreadyExists,
    Code::PermissionDenied,
    Code::ResourceExhausted,
    Code::FailedPrecondition,
    Code::Aborted,
    Code::OutOfRange,
    Code::Unimplemented,
    Code::Internal,
    Code::Unavailable,
    Code::DataLoss,
    Code::Unauthenticated,
];

// ---- our client ----

/// Runs all cases of the specification that concern only gRPC, each under its name there.
pub fn client_cases(channel: &Channel) {
    empty_unary(channel);
    large_unary(channel);
    client_streaming(channel);
    server_streaming(channel);
    ping_pong(channel);
    empty_stream(channel);
    timeout_on_sleeping_server(channel);
    cancel_after_begin(channel);
    cancel_after_first_response(channel);
    status_code_and_message(channel);
    special_status_message(channel);
    unimplemented_method(channel);
    unimplemented_service(channel);
    custom_metadata(channel);
}

fn unary<Q: Message, R: Message + Default>(
    channel: &Channel,
    method: &str,
    request: &Q,
) -> Result<R, Status> {
    channel.unary(&test_method(method), request, &soon())
}

fn full_duplex(
    channel: &Channel,
    options: &CallOptions,
) -> (
    Requests<StreamingOutputCallRequest>,
    Responses<StreamingOutputCallResponse>,
) {
    channel
        .streaming(&test_method("FullDuplexCall"), options)
        .unwrap()
}

fn empty_unary(channel: &Channel) {
    assert_eq!(
        unary::<_, Empty>(channel, "EmptyCall", &Empty {}).unwrap(),
        Empty {}
    );
}

fn large_unary(channel: &Channel) {
    let response: SimpleResponse = unary(channel, "UnaryCall", &large_request()).unwrap();
    assert!(response.payload == zeros(LARGE_RESPONSE as usize));
}

fn client_streaming(channel: &Channel) {
    let (mut requests, mut response) = channel
        .streaming(&test_method("StreamingInputCall"), &soon())
        .unwrap();
    for size in SENT {
        requests
            .send(&StreamingInputCallRequest {
                payload: zeros(size),
            })
            .unwrap();
    }
    requests.finish().unwrap();
    let response: StreamingInputCallResponse = response.one().unwrap();
    assert_eq!(response.aggregated_payload_size, 74922);
}

fn server_streaming(channel: &Channel) {
    let responses = channel
        .server_streaming(
            &test_method("StreamingOutputCall"),
            &ask(&ASKED, 0),
            &soon(),
        )
        .unwrap();
    let sizes = responses.map(|response: Result<StreamingOutputCallResponse, _>| {
        size(&response.unwrap().payload) as i32
    });
    assert_eq!(sizes.collect::<Vec<_>>(), ASKED);
}

fn ping_pong(channel: &Channel) {
    let (mut requests, mut responses) = full_duplex(channel, &soon());
    for (asked, sent) in ASKED.into_iter().zip(SENT) {
        requests.send(&ask(&[asked], sent)).unwrap();
        assert!(responses.next().unwrap().unwrap().payload == zeros(asked as usize));
    }
    requests.finish().unwrap();
    assert!(responses.next().is_none());
}

fn empty_stream(channel: &Channel) {
    let (requests, mut responses) = full_duplex(channel, &soon());
    requests.finish().unwrap();
    assert!(responses.next().is_none());
}

fn timeout_on_sleeping_server(channel: &Channel) {
    let (mut requests, mut responses) = full_duplex(channel, &within(Duration::from_millis(1)));
    // The call may be over before this is sent.
    let _ = requests.send(&ask(&[], SENT[0]));
    assert_eq!(
        responses.next().unwrap().unwrap_err().code(),
        Code::DeadlineExceeded
    );
}

fn cancel_after_begin(channel: &Channel) {
    let method = test_method("StreamingInputCall");
    let (requests, mut response) = channel
        .streaming::<StreamingInputCallRequest, StreamingInputCallResponse>(&method, &soon())
        .unwrap();
    drop(requests);
    assert_eq!(response.one().unwrap_err().code(), Code::Cancelled);
}

fn cancel_after_first_response(channel: &Channel) {
    let (mut requests, mut responses) = full_duplex(channel, &soon());
    requests.send(&ask(&ASKED[..1], SENT[0])).unwrap();
    assert!(responses.next().unwrap().unwrap().payload == zeros(ASKED[0] as usize));
    drop(requests);
    assert_eq!(
        responses.next().unwrap().unwrap_err().code(),
        Code::Cancelled
    );
}

fn status_code_and_message(channel: &Channel) {
    comes_back(channel, Code::Unknown, "test status message");
    // This is beyond the specification: each code must arrive as itself.
    for code in ERRORS {
        comes_back(channel, code, "");
    }
}

fn special_status_message(channel: &Channel) {
    comes_back(channel, Code::Unknown, SPECIAL);
}

/// Asks for a status in a unary and in a streaming call.
fn comes_back(channel: &Channel, code: Code, message: &str) {
    let response_status = ask_to_fail(code as i32, message);
    let request = SimpleRequest {
        response_status: response_status.clone(),
        ..SimpleRequest::default()
    };
    let status = unary::<_, SimpleResponse>(channel, "UnaryCall", &request).unwrap_err();
    assert_eq!((status.code(), status.message()), (code, message));

    let (mut requests, mut responses) = full_duplex(channel, &soon());
    requests
        .send(&StreamingOutputCallRequest {
            response_status,
            ..ask(&[], 0)
        })
        .unwrap();
    // The server has answered and need not read any more.
    let _ = requests.finish();
    let status = responses.next().unwrap().unwrap_err();
    assert_eq!((status.code(), status.message()), (code, message));
}

fn unimplemented_method(channel: &Channel) {
    let status = unary::<_, Empty>(channel, "UnimplementedCall", &Empty {}).unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

fn unimplemented_service(channel: &Channel) {
    let path = "/grpc.testing.UnimplementedService/UnimplementedCall";
    let status = channel
        .unary::<_, Empty>(path, &Empty {}, &soon())
        .unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

fn custom_metadata(channel: &Channel) {
    let mut options = soon();
    options.metadata.insert(ECHO_INITIAL, INITIAL).unwrap();
    let trailing = BASE64.encode(TRAILING);
    options.metadata.insert(ECHO_TRAILING, &trailing).unwrap();

    // A unary call whose metadata is available.
    let method = test_method("UnaryCall");
    let mut response: Responses<SimpleResponse> = channel
        .server_streaming(&method, &large_request(), &options)
        .unwrap();
    assert_echoed(&mut response, |response| {
        assert_eq!(
            size(&response.one().unwrap().payload),
            LARGE_RESPONSE as usize
        );
    });

    let (mut requests, mut responses) = full_duplex(channel, &options);
    requests
        .send(&ask(&[LARGE_RESPONSE], LARGE_REQUEST))
        .unwrap();
    requests.finish().unwrap();
    assert_echoed(&mut responses, |responses| {
        assert_eq!(
            size(&responses.next().unwrap().unwrap().payload),
            LARGE_RESPONSE as usize
        );
        assert!(responses.next().is_none());
    });
}

fn assert_echoed<R>(responses: &mut Responses<R>, to_the_end: impl FnOnce(&mut Responses<R>)) {
    assert_eq!(
        responses.headers().unwrap().unwrap().get(ECHO_INITIAL),
        Some(INITIAL)
    );
    to_the_end(responses);
    let trailing = BASE64.decode(responses.trailers().get(ECHO_TRAILING).unwrap());
    assert_eq!(trailing.unwrap(), TRAILING);
}
