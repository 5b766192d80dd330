//! The test service of gRPC's interoperability specification for tonic: the server, and each case
//! for the client under its name there.

use std::convert::Infallible;
use std::sync::mpsc::Receiver;
use std::task::{Context, Poll};
use std::time::Duration;

use prost::Message;
use rpc::grpc::Code;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::server::{Grpc, NamedService};
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::testing::{
    ASKED, ECHO_INITIAL, ECHO_TRAILING, EchoStatus, Empty, INITIAL, LARGE_REQUEST, LARGE_RESPONSE,
    MOST, SENT, SPECIAL, Seen, SimpleRequest, SimpleResponse, StreamingInputCallRequest,
    StreamingInputCallResponse, StreamingOutputCallRequest, StreamingOutputCallResponse, TRAILING,
    ask, ask_to_fail, asked_for, large_request, size, test_method, wait_for, zeros,
};
use super::tonic::Later;

// ---- the server ----

/// tonic's test service.
#[derive(Clone)]
pub struct TestService;

impl NamedService for TestService {
    const NAME: &'static str = "grpc.testing.TestService";
}

impl Service<http::Request<Body>> for TestService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Later<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match method {
                "EmptyCall" => {
                    Grpc::new(ProstCodec::default())
                        .unary(Handler(empty_call), request)
                        .await
                }
                // tonic has no trailing metadata for a unary method; on the wire there is no
                // difference.
                "UnaryCall" => {
                    Grpc::new(ProstCodec::default())
                        .server_streaming(Handler(unary_call), request)
                        .await
                }
                "StreamingInputCall" => {
                    Grpc::new(ProstCodec::default())
                        .client_streaming(Handler(streaming_input_call), request)
                        .await
                }
                "StreamingOutputCall" => {
                    Grpc::new(ProstCodec::default())
                        .server_streaming(Handler(streaming_output_call), request)
                        .await
                }
                "FullDuplexCall" => {
                    Grpc::new(ProstCodec::default())
                        .streaming(Handler(full_duplex_call), request)
                        .await
                }
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

/// A function as one of tonic's services; its types determine which of the four kinds of call it
/// is.
struct Handler<F>(F);

impl<F, O, Q, R> Service<Request<Q>> for Handler<F>
where
    F: FnMut(Request<Q>) -> O,
    O: Future<Output = Result<Response<R>, Status>>,
{
    type Response = Response<R>;
    type Error = Status;
    type Future = O;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> O {
        self.0(request)
    }
}

type Answer<R> = Result<Response<R>, Status>;
type Stream<R> = ReceiverStream<Result<R, Status>>;

async fn empty_call(request: Request<Empty>) -> Answer<Empty> {
    Ok(Response::new(request.into_inner()))
}

async fn unary_call(request: Request<SimpleRequest>) -> Answer<Stream<SimpleResponse>> {
    let (sender, response) = answer(request.metadata());
    let trailers = trailers(request.metadata());
    let SimpleRequest {
        response_size,
        response_status,
        ..
    } = request.into_inner();
    fail_if_asked(&response_status)?;
    let payload = Some(asked_for(response_size).ok_or_else(nonsense)?);
    tokio::spawn(async move {
        let _ = sender.send(Ok(SimpleResponse { payload })).await;
        let _ = sender.send(Err(trailers)).await;
    });
    Ok(response)
}

async fn streaming_input_call(
    request: Request<Streaming<StreamingInputCallRequest>>,
) -> Answer<StreamingInputCallResponse> {
    let mut requests = request.into_inner();
    let mut sum = 0;
    while let Some(request) = requests.message().await? {
        sum += size(&request.payload);
    }
    Ok(Response::new(StreamingInputCallResponse {
        aggregated_payload_size: sum as i32,
    }))
}

async fn streaming_output_call(
    request: Request<StreamingOutputCallRequest>,
) -> Answer<Stream<StreamingOutputCallResponse>> {
    let (sender, response) = answer(request.metadata());
    tokio::spawn(async move { respond(&request.into_inner(), &sender).await });
    Ok(response)
}

async fn full_duplex_call(
    request: Request<Streaming<StreamingOutputCallRequest>>,
) -> Answer<Stream<StreamingOutputCallResponse>> {
    let (sender, response) = answer(request.metadata());
    let trailers = trailers(request.metadata());
    let mut requests = request.into_inner();
    tokio::spawn(async move {
        // tonic reports a request stream that the client cancels as ended. The responses below then
        // have no receiver.
        while let Ok(Some(request)) = requests.message().await {
            respond(&request, &sender).await;
        }
        let _ = sender.send(Err(trailers)).await;
    });
    Ok(response)
}

/// Creates the sender for a handler's responses, and tonic's response with the headers to echo.
fn answer<R>(asked: &MetadataMap) -> (mpsc::Sender<Result<R, Status>>, Response<Stream<R>>) {
    let (sender, responses) = mpsc::channel(1);
    let mut response = Response::new(ReceiverStream::new(responses));
    if let Some(value) = asked.get(ECHO_INITIAL) {
        response.metadata_mut().insert(ECHO_INITIAL, value.clone());
    }
    (sender, response)
}

/// Returns the trailers to echo. They are an "error" with the status OK, because tonic has no other
/// way to send them.
fn trailers(asked: &MetadataMap) -> Status {
    let mut metadata = MetadataMap::new();
    if let Some(value) = asked.get_bin(ECHO_TRAILING) {
        metadata.insert_bin(ECHO_TRAILING, value.clone());
    }
    Status::with_metadata(tonic::Code::Ok, "", metadata)
}

/// Sends the responses that a request asks for; ignores a missing receiver.
async fn respond(
    request: &StreamingOutputCallRequest,
    responses: &mpsc::Sender<Result<StreamingOutputCallResponse, Status>>,
) {
    if let Err(status) = fail_if_asked(&request.response_status) {
        return drop(responses.send(Err(status)).await);
    }
    for parameters in &request.response_parameters {
        let payload = asked_for(parameters.size).ok_or_else(nonsense);
        let response = payload.map(|payload| StreamingOutputCallResponse {
            payload: Some(payload),
        });
        let _ = responses.send(response).await;
    }
}

fn fail_if_asked(status: &Option<EchoStatus>) -> Result<(), Status> {
    status.as_ref().map_or(Ok(()), |status| {
        Err(Status::new(status.code.into(), status.message.clone()))
    })
}

fn nonsense() -> Status {
    Status::invalid_argument("this size of a response makes no sense")
}

// ---- the client ----

/// Runs all cases against our server, which sends its events to `seen`.
pub async fn client_cases(channel: &Channel, seen: &Receiver<Seen>) {
    empty_unary(channel).await;
    large_unary(channel).await;
    client_streaming(channel).await;
    server_streaming(channel).await;
    ping_pong(channel).await;
    empty_stream(channel).await;
    timeout_on_sleeping_server(channel).await;
    cancel_after_begin(channel, seen).await;
    cancel_after_first_response(channel, seen).await;
    status_code_and_message(channel).await;
    special_status_message(channel).await;
    unimplemented_method(channel).await;
    unimplemented_service(channel).await;
    custom_metadata(channel).await;
}

async fn ready(channel: &Channel) -> tonic::client::Grpc<Channel> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    client
}

async fn unary<Q, R>(
    channel: &Channel,
    path: String,
    request: Request<Q>,
) -> Result<Response<R>, Status>
where
    Q: Message + 'static,
    R: Message + Default + 'static,
{
    ready(channel)
        .await
        .unary(request, path.parse().unwrap(), ProstCodec::default())
        .await
}

async fn input_call(
    channel: Channel,
    requests: Stream<StreamingInputCallRequest>,
) -> Result<Response<StreamingInputCallResponse>, Status> {
    let path = test_method("StreamingInputCall").parse().unwrap();
    let requests = Request::new(requests.map(Result::unwrap));
    ready(&channel)
        .await
        .client_streaming(requests, path, ProstCodec::default())
        .await
}

async fn full_duplex(
    channel: &Channel,
    request: Request<impl tokio_stream::Stream<Item = StreamingOutputCallRequest> + Send + 'static>,
) -> Result<Response<Streaming<StreamingOutputCallResponse>>, Status> {
    let path = test_method("FullDuplexCall").parse().unwrap();
    ready(channel)
        .await
        .streaming(request, path, ProstCodec::default())
        .await
}

async fn empty_unary(channel: &Channel) {
    let response: Response<Empty> =
        unary(channel, test_method("EmptyCall"), Request::new(Empty {}))
            .await
            .unwrap();
    assert_eq!(response.into_inner(), Empty {});
}

async fn large_unary(channel: &Channel) {
    let request = Request::new(large_request());
    let response: Response<SimpleResponse> = unary(channel, test_method("UnaryCall"), request)
        .await
        .unwrap();
    assert!(response.into_inner().payload == zeros(LARGE_RESPONSE as usize));
}

async fn client_streaming(channel: &Channel) {
    let (sender, requests) = mpsc::channel(SENT.len());
    for size in SENT {
        sender
            .send(Ok(StreamingInputCallRequest {
                payload: zeros(size),
            }))
            .await
            .unwrap();
    }
    drop(sender);
    let response = input_call(channel.clone(), ReceiverStream::new(requests))
        .await
        .unwrap();
    assert_eq!(response.into_inner().aggregated_payload_size, 74922);
}

async fn server_streaming(channel: &Channel) {
    let path = test_method("StreamingOutputCall").parse().unwrap();
    let codec = ProstCodec::<_, StreamingOutputCallResponse>::default();
    let request = Request::new(ask(&ASKED, 0));
    let responses = ready(channel)
        .await
        .server_streaming(request, path, codec)
        .await
        .unwrap()
        .into_inner();
    let sizes = responses.map(|response| size(&response.unwrap().payload) as i32);
    assert_eq!(sizes.collect::<Vec<_>>().await, ASKED);
}

async fn ping_pong(channel: &Channel) {
    let (sender, requests) = mpsc::channel(1);
    let mut responses = None;
    let mut requests = Some(ReceiverStream::new(requests));
    for (asked, sent) in ASKED.into_iter().zip(SENT) {
        sender.send(ask(&[asked], sent)).await.unwrap();
        // tonic waits for the headers, which come with the first response.
        if let Some(requests) = requests.take() {
            responses = Some(
                full_duplex(channel, Request::new(requests))
                    .await
                    .unwrap()
                    .into_inner(),
            );
        }
        let response = responses
            .as_mut()
            .unwrap()
            .message()
            .await
            .unwrap()
            .unwrap();
        assert!(response.payload == zeros(asked as usize));
    }
    drop(sender);
    assert_eq!(responses.unwrap().message().await.unwrap(), None);
}

async fn empty_stream(channel: &Channel) {
    let mut responses = full_duplex(channel, Request::new(tokio_stream::empty()))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(responses.message().await.unwrap(), None);
}

async fn timeout_on_sleeping_server(channel: &Channel) {
    let requests = tokio_stream::once(ask(&[], SENT[0])).chain(tokio_stream::pending());
    let mut request = Request::new(requests);
    request.set_timeout(Duration::from_millis(1));
    let status = full_duplex(channel, request).await.unwrap_err();
    // If tonic's own clock is first, it reports a cancellation.
    let is_tonics =
        status.code() == tonic::Code::Cancelled && status.message() == "Timeout expired";
    assert!(
        is_tonics || status.code() == tonic::Code::DeadlineExceeded,
        "{status}"
    );
}

async fn cancel_after_begin(channel: &Channel, seen: &Receiver<Seen>) {
    // Before this, nothing is on the wire that could be cancelled.
    while seen.try_recv().is_ok() {}
    let (_sender, requests) = mpsc::channel(1);
    let call = tokio::spawn(input_call(channel.clone(), ReceiverStream::new(requests)));
    wait_for(seen, Seen::Begun);
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    wait_for(seen, Seen::BrokenInput(Code::Cancelled));
}

async fn cancel_after_first_response(channel: &Channel, seen: &Receiver<Seen>) {
    // tonic cancels a call only if it has no more to send. The responses exceed its windows.
    let requests = tokio_stream::once(ask(&[MOST; 64], SENT[0]));
    let mut responses = full_duplex(channel, Request::new(requests))
        .await
        .unwrap()
        .into_inner();
    assert!(responses.message().await.unwrap().unwrap().payload == zeros(MOST as usize));
    drop(responses);
    wait_for(seen, Seen::BrokenAfterResponse(Code::Cancelled));
}

async fn status_code_and_message(channel: &Channel) {
    comes_back(channel, 2, "test status message").await;
    // This is beyond the specification: each code must arrive as itself.
    for code in 1..=16 {
        comes_back(channel, code, "").await;
    }
}

async fn special_status_message(channel: &Channel) {
    comes_back(channel, 2, SPECIAL).await;
}

/// Asks for a status in a unary and in a streaming call.
async fn comes_back(channel: &Channel, code: i32, message: &str) {
    let response_status = ask_to_fail(code, message);
    let request = SimpleRequest {
        response_status: response_status.clone(),
        ..SimpleRequest::default()
    };
    let call = unary::<_, SimpleResponse>(channel, test_method("UnaryCall"), Request::new(request));
    let status = call.await.unwrap_err();
    assert_eq!((status.code() as i32, status.message()), (code, message));

    let request = StreamingOutputCallRequest {
        response_status,
        ..ask(&[], 0)
    };
    // A response of only trailers ends the call here; otherwise the call begins.
    let status = match full_duplex(channel, Request::new(tokio_stream::once(request))).await {
        Ok(responses) => responses.into_inner().message().await.unwrap_err(),
        Err(status) => status,
    };
    assert_eq!((status.code() as i32, status.message()), (code, message));
}

async fn unimplemented_method(channel: &Channel) {
    let call = unary::<_, Empty>(
        channel,
        test_method("UnimplementedCall"),
        Request::new(Empty {}),
    );
    assert_eq!(call.await.unwrap_err().code(), tonic::Code::Unimplemented);
}

async fn unimplemented_service(channel: &Channel) {
    let path = "/grpc.testing.UnimplementedService/UnimplementedCall".to_owned();
    let call = unary::<_, Empty>(channel, path, Request::new(Empty {}));
    assert_eq!(call.await.unwrap_err().code(), tonic::Code::Unimplemented);
}

async fn custom_metadata(channel: &Channel) {
    let request = with_metadata(large_request());
    let response: Response<SimpleResponse> = unary(channel, test_method("UnaryCall"), request)
        .await
        .unwrap();
    assert_eq!(size(&response.get_ref().payload), LARGE_RESPONSE as usize);
    // tonic merges headers and trailers of a unary call.
    assert_eq!(response.metadata().get(ECHO_INITIAL).unwrap(), INITIAL);
    assert_eq!(
        response
            .metadata()
            .get_bin(ECHO_TRAILING)
            .unwrap()
            .to_bytes()
            .unwrap(),
        TRAILING
    );

    let request = with_metadata(tokio_stream::once(ask(&[LARGE_RESPONSE], LARGE_REQUEST)));
    let response = full_duplex(channel, request).await.unwrap();
    assert_eq!(response.metadata().get(ECHO_INITIAL).unwrap(), INITIAL);
    let mut responses = response.into_inner();
    assert_eq!(
        size(&responses.message().await.unwrap().unwrap().payload),
        LARGE_RESPONSE as usize
    );
    assert_eq!(responses.message().await.unwrap(), None);
    let trailers = responses.trailers().await.unwrap().unwrap();
    assert_eq!(
        trailers.get_bin(ECHO_TRAILING).unwrap().to_bytes().unwrap(),
        TRAILING
    );
}

fn with_metadata<M>(message: M) -> Request<M> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert(ECHO_INITIAL, INITIAL.parse().unwrap());
    request
        .metadata_mut()
        .insert_bin(ECHO_TRAILING, MetadataValue::from_bytes(TRAILING));
    request
}
