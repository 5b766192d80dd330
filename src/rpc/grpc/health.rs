//! The standard health service `grpc.health.v1`, which every [`Server`](super::Server) has. Only
//! `Check` is implemented: `Watch` would hold a handler for as long as the peer likes, and its
//! definition tells clients to accept UNIMPLEMENTED.

use std::collections::HashSet;

use super::call::Call;
use super::router::Router;
use super::status::{Code, Status};

/// `HealthCheckResponse.ServingStatus.SERVING`.
pub const SERVING: i32 = 1;
/// `HealthCheckResponse.ServingStatus.NOT_SERVING`: see [`Router::ready_when`].
const NOT_SERVING: i32 = 2;

/// Asks for the health of a service.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckRequest {
    /// An empty name means the server as a whole.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// The health of a service.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HealthCheckResponse {
    /// `ServingStatus`, such as [`SERVING`].
    #[prost(int32, tag = "1")]
    pub status: i32,
}

/// The method that answers [`HealthCheckRequest`].
pub const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Adds the health service to `router`.
pub(super) fn add(mut router: Router) -> Router {
    let ready = router.ready.take();
    let status = move || {
        if ready.as_ref().is_none_or(|ready| ready()) {
            SERVING
        } else {
            NOT_SERVING
        }
    };
    let services: HashSet<String> = router.methods.services().map(str::to_owned).collect();
    router.unary(CHECK, move |_: &Call, request: HealthCheckRequest| {
        if request.service.is_empty() || services.contains(&request.service) {
            Ok(HealthCheckResponse { status: status() })
        } else {
            Err(Status::new(
                Code::NotFound,
                "the server has no such service",
            ))
        }
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::super::{CallOptions, Channel, Limits, Server};
    use super::*;

    #[test]
    fn every_server_reports_the_health_of_its_services() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let accept = Arc::new(|socket: TcpStream, _: Instant| transport::plain::transport(socket));
        let is_ready = Arc::new(AtomicBool::new(true));
        let ready = is_ready.clone();
        let router = Router::new()
            .unary("/a.B/C", |_: &Call, request: HealthCheckRequest| {
                Ok(request)
            })
            .ready_when(move || ready.load(Ordering::Relaxed));
        let server = Server::start("test", listener, accept, router, Limits::default()).unwrap();
        let socket = TcpStream::connect(server.local_addr()).unwrap();
        let channel =
            Channel::new(transport::plain::transport(socket).unwrap(), "localhost").unwrap();
        let ask = |method: &str, service: &str| -> Result<HealthCheckResponse, Code> {
            let request = HealthCheckRequest {
                service: service.into(),
            };
            let path = format!("/grpc.health.v1.Health/{method}");
            channel
                .unary(&path, &request, &CallOptions::default())
                .map_err(|status| status.code())
        };
        assert_eq!(
            ask("Check", ""),
            Ok(HealthCheckResponse { status: SERVING })
        );
        assert_eq!(
            ask("Check", "a.B"),
            Ok(HealthCheckResponse { status: SERVING })
        );
        assert_eq!(ask("Check", "a.B/C"), Err(Code::NotFound));
        assert_eq!(ask("Check", "a"), Err(Code::NotFound));
        assert_eq!(ask("Watch", ""), Err(Code::Unimplemented));
        is_ready.store(false, Ordering::Relaxed);
        let status = NOT_SERVING;
        assert_eq!(ask("Check", ""), Ok(HealthCheckResponse { status }));
        assert_eq!(ask("Check", "a"), Err(Code::NotFound));
    }
}
