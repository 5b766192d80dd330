//! tonic for benches/rpc.rs.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::TcpListener;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::Blob;

/// Serves until `wait` returns.
pub fn serve(listener: TcpListener, wait: impl FnOnce()) {
    let runtime = Runtime::new().unwrap();
    listener.set_nonblocking(true).unwrap();
    runtime.spawn(async move {
        let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
        Server::builder().add_service(Bench).serve_with_incoming(incoming.map_nodelay()).await.unwrap();
    });
    wait();
}

trait MapNodelay {
    fn map_nodelay(self) -> Pin<Box<dyn tokio_stream::Stream<Item = std::io::Result<tokio::net::TcpStream>> + Send>>;
}

impl MapNodelay for TcpListenerStream {
    fn map_nodelay(self) -> Pin<Box<dyn tokio_stream::Stream<Item = std::io::Result<tokio::net::TcpStream>> + Send>> {
        use tokio_stream::StreamExt;
        Box::pin(self.map(|socket| socket.and_then(|socket| socket.set_nodelay(true).map(|()| socket))))
    }
}

/// Calls a second over all connections.
pub fn run(port: u16, connections: usize, time: Duration) -> f64 {
    Runtime::new().unwrap().block_on(async {
        let mut tasks = Vec::new();
        let until = Instant::now() + time;
        for _ in 0..connections {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap().tcp_nodelay(true);
            tasks.push(tokio::spawn(async move {
                let mut client = tonic::client::Grpc::new(endpoint.connect().await.unwrap());
                let (request, mut calls) = (Blob { data: vec![b'x'; 16] }, 0);
                while Instant::now() < until {
                    client.ready().await.unwrap();
                    let codec = ProstCodec::<Blob, Blob>::default();
                    let path = http::uri::PathAndQuery::from_static("/bench.Bench/Echo");
                    let response = client.unary(Request::new(request.clone()), path, codec).await.unwrap();
                    assert_eq!(response.into_inner(), request);
                    calls += 1;
                }
                calls
            }));
        }
        let mut calls = 0;
        for task in tasks {
            calls += task.await.unwrap();
        }
        f64::from(calls) / time.as_secs_f64()
    })
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
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(Echo, request).await) })
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
