//! tonic as a peer of benches/rpc.rs, which describes the command line.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::io::{self, BufRead, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use std::{env, fs};

use tokio::sync::Barrier;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::http::{self, uri::PathAndQuery};
use tonic::codegen::{Bytes, Service};
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, prost::Message)]
struct Blob {
    #[prost(bytes = "bytes", tag = "1")]
    data: Bytes,
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve"] => serve(Server::builder()).await,
        ["serve", certificate, key] => {
            let identity =
                Identity::from_pem(fs::read(certificate).unwrap(), fs::read(key).unwrap());
            serve(
                Server::builder()
                    .tls_config(ServerTlsConfig::new().identity(identity))
                    .unwrap(),
            )
            .await;
        }
        [
            "call",
            method,
            port,
            connections,
            seconds,
            ref certificate @ ..,
        ] => {
            let seconds = Duration::from_secs_f64(seconds.parse().unwrap());
            call(
                method,
                port,
                connections.parse().unwrap(),
                seconds,
                certificate.first().copied(),
            )
            .await;
        }
        _ => panic!("usage: see benches/rpc.rs"),
    }
}

// ---- server ----

async fn serve(mut server: Server) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let incoming = TcpListenerStream::new(listener)
        .map(|socket| socket.and_then(|socket| socket.set_nodelay(true).map(|()| socket)));
    let until = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut Vec::new()));
    server
        .add_service(Bench)
        .serve_with_incoming_shutdown(incoming, async { drop(until.await) })
        .await
        .unwrap();
}

#[derive(Clone)]
struct Bench;

impl NamedService for Bench {
    const NAME: &'static str = "bench.Bench";
}

impl Service<http::Request<Body>> for Bench {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::default());
            Ok(match request.uri().path() {
                "/bench.Bench/Echo" => grpc.unary(Echo, request).await,
                "/bench.Bench/Stream" => grpc.server_streaming(Stream, request).await,
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

struct Echo;

impl UnaryService<Blob> for Echo {
    type Response = Blob;
    type Future = Ready<Result<Response<Blob>, Status>>;

    fn call(&mut self, request: Request<Blob>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}

/// 64 messages of 1 MiB.
struct Stream;

impl ServerStreamingService<Blob> for Stream {
    type Response = Blob;
    type ResponseStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<Blob, Status>> + Send>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, _: Request<Blob>) -> Self::Future {
        let blob = Blob {
            data: vec![b'x'; 1 << 20].into(),
        };
        let stream: Self::ResponseStream =
            Box::pin(tokio_stream::iter((0..64).map(move |_| Ok(blob.clone()))));
        ready(Ok(Response::new(stream)))
    }
}

// ---- client ----

async fn call(
    method: &str,
    port: &str,
    connections: usize,
    time: Duration,
    certificate: Option<&str>,
) {
    let scheme = if certificate.is_some() {
        "https"
    } else {
        "http"
    };
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://127.0.0.1:{port}"))
        .unwrap()
        .tcp_nodelay(true);
    if let Some(certificate) = certificate {
        let certificate = Certificate::from_pem(fs::read(certificate).unwrap());
        let config = ClientTlsConfig::new()
            .ca_certificate(certificate)
            .domain_name("localhost");
        endpoint = endpoint.tls_config(config).unwrap();
    }
    let (ready, go) = (
        Arc::new(Barrier::new(connections + 1)),
        Arc::new(Barrier::new(connections + 1)),
    );
    let mut tasks = Vec::new();
    for _ in 0..connections {
        let (ready, go, endpoint, is_stream) = (
            ready.clone(),
            go.clone(),
            endpoint.clone(),
            method == "stream",
        );
        tasks.push(tokio::spawn(async move {
            let mut client = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
            for _ in 0..if is_stream { 1 } else { 10 } {
                call_one(&mut client, is_stream).await;
            }
            ready.wait().await;
            go.wait().await;
            let (mut times, mut now) = (Vec::new(), Instant::now());
            let until = now + time;
            while now < until {
                call_one(&mut client, is_stream).await;
                times.push(now.elapsed().as_nanos());
                now = Instant::now();
            }
            times
        }));
    }
    ready.wait().await;
    println!("ready");
    tokio::task::spawn_blocking(|| io::stdin().lock().read_line(&mut String::new()))
        .await
        .unwrap()
        .unwrap();
    go.wait().await;
    let mut output = String::new();
    for task in tasks {
        task.await
            .unwrap()
            .iter()
            .for_each(|time| output += &format!("{time} "));
    }
    output.push('\n');
    io::stdout().write_all(output.as_bytes()).unwrap();
}

async fn call_one(client: &mut tonic::client::Grpc<Channel>, is_stream: bool) {
    client.ready().await.unwrap();
    let codec = ProstCodec::<Blob, Blob>::default();
    let request = Blob {
        data: Bytes::from_static(&[b'x'; 16]),
    };
    if is_stream {
        let path = PathAndQuery::from_static("/bench.Bench/Stream");
        let responses = client
            .server_streaming(Request::new(request), path, codec)
            .await
            .unwrap();
        let sizes: Vec<usize> = responses
            .into_inner()
            .map(|response| response.unwrap().data.len())
            .collect()
            .await;
        assert_eq!(sizes.iter().sum::<usize>(), 64 << 20);
    } else {
        let path = PathAndQuery::from_static("/bench.Bench/Echo");
        let response = client
            .unary(Request::new(request.clone()), path, codec)
            .await
            .unwrap();
        assert_eq!(response.into_inner(), request);
    }
}
