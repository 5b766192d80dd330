//! tonic as a peer, without generated code. `tonic_testing.rs` has the cases of the
//! interoperability specification.

use std::convert::Infallible;
use std::future::Future;
use std::net::TcpListener;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::super::{Blob, OurServer};
use super::tls;
use super::tonic_testing::{self, TestService};

const MIB: usize = 1 << 20;

/// Runs tonic's client against our server, over TLS if there is an identity.
pub fn client_cases(server: &OurServer, identity: Option<&tls::Identity>) {
    let port = server.port();
    Runtime::new().unwrap().block_on(async {
        let endpoint = match identity {
            None => Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap(),
            Some(identity) => {
                let pem = std::fs::read(identity.certificate_file()).unwrap();
                let config = ClientTlsConfig::new()
                    .ca_certificate(Certificate::from_pem(pem))
                    .domain_name("localhost");
                Endpoint::from_shared(format!("https://127.0.0.1:{port}"))
                    .unwrap()
                    .tls_config(config)
                    .unwrap()
            }
        };
        let channel = endpoint.connect().await.unwrap();
        tonic_testing::client_cases(&channel, &server.seen).await;
        let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(64 * MIB);
        for size in [0, 1, 1000, 12 * MIB] {
            let request = Blob {
                data: vec![1; size],
                count: 3,
            };
            client.ready().await.unwrap();
            let response = client
                .unary(Request::new(request.clone()), path("Echo"), codec())
                .await
                .unwrap();
            assert!(response.into_inner() == request);
        }
        for (size, count) in [(0, 0), (1000, 1000), (MIB, 24)] {
            client.ready().await.unwrap();
            let request = Request::new(Blob {
                data: vec![1; size],
                count,
            });
            let responses = client
                .server_streaming(request, path("Many"), codec())
                .await
                .unwrap()
                .into_inner();
            let counts: Vec<u32> = responses
                .map(|response| response.unwrap().count)
                .collect()
                .await;
            assert_eq!(counts, (0..count).collect::<Vec<_>>());
        }
        client.ready().await.unwrap();
        let status = client
            .unary(Request::new(Blob::default()), path("Fail"), codec())
            .await
            .unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (tonic::Code::NotFound, super::super::TEXT)
        );
        client.ready().await.unwrap();
        let status = client
            .unary(Request::new(Blob::default()), path("Nope"), codec())
            .await
            .unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unimplemented);
    });
}

fn path(method: &str) -> PathAndQuery {
    format!("/test.Interop/{method}").parse().unwrap()
}

fn codec() -> ProstCodec<Blob, Blob> {
    ProstCodec::default()
}

/// A tonic server; it lives as long as its runtime.
pub struct TonicServer {
    _runtime: Runtime,
    pub port: u16,
}

/// Starts a server, with TLS if there is an identity.
pub fn start_server(identity: Option<&tls::Identity>) -> TonicServer {
    let runtime = Runtime::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut builder = Server::builder().tcp_nodelay(true);
    if let Some(identity) = identity {
        let [certificate, key] = [identity.certificate_file(), identity.key_file()]
            .map(|file| std::fs::read(file).unwrap());
        let config = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
        builder = builder.tls_config(config).unwrap();
    }
    runtime.spawn(async move {
        let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
        let router = builder.add_service(Interop).add_service(TestService);
        router.serve_with_incoming(incoming).await.unwrap();
    });
    TonicServer {
        _runtime: runtime,
        port,
    }
}

pub type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Clone)]
struct Interop;

impl NamedService for Interop {
    const NAME: &'static str = "test.Interop";
}

impl Service<http::Request<Body>> for Interop {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Later<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(codec()).max_decoding_message_size(64 * MIB);
            Ok(match request.uri().path() {
                "/test.Interop/Echo" => grpc.unary(Echo, request).await,
                "/test.Interop/Many" => grpc.server_streaming(Many, request).await,
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

struct Echo;

impl UnaryService<Blob> for Echo {
    type Response = Blob;
    type Future = Later<Result<Response<Blob>, Status>>;

    fn call(&mut self, request: Request<Blob>) -> Self::Future {
        Box::pin(async move { Ok(Response::new(request.into_inner())) })
    }
}

struct Many;

impl ServerStreamingService<Blob> for Many {
    type Response = Blob;
    type ResponseStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<Blob, Status>> + Send>>;
    type Future = Later<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Blob>) -> Self::Future {
        Box::pin(async move {
            let Blob { data, count } = request.into_inner();
            let blobs = (0..count).map(move |count| {
                Ok(Blob {
                    data: data.clone(),
                    count,
                })
            });
            let stream: Self::ResponseStream = Box::pin(tokio_stream::iter(blobs));
            Ok(Response::new(stream))
        })
    }
}
