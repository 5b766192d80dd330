//! The InitServer: waits on TCP port 9000, over attested TLS, for the operator's init, which makes
//! this node the first of a cluster.
//!
//! The operator verifies the node before sending anything. The node authenticates the operator by
//! the init secret; the metadata service has its hash. The set-up does not depend on the
//! connection: it continues when the operator's connection breaks, and a repeated request gets all
//! events and the same answer.
//!
//! ```text
//!   Init ─► secret right? ─► request sound? ─► node lock ─► set-up, on a thread of its own
//!                                 │ same cluster, begun before      │ events, ending
//!                                 └──────────────────────────► watch ◄┘
//! ```

use base::sync::lock;
use std::fmt::Display;
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::first::init::{Done, Init, InitRefused, InitSecrets};
use crate::lock::{
    node_lock::Locking,
    race::Entrant,
    secret_guard::{GuardOutcome, SecretGuard},
};
use crate::steps::{
    clock,
    error::Error,
    job::{Job, JobEvent, JobResult},
    setup::{NodeParts, SetupOutcome},
};
use attest::Issuer;
use node::record;
use proto::init::PROGRESS;
use proto::init::init_response::Kind;
use proto::init::{
    INIT, InitFailureResponse, InitRequest, InitResponse, InitSuccessResponse, MAX_REQUEST,
    ProgressResponse,
};
use rpc::grpc::{Call, Code, Limits, Router, Sender, Server, Status};

/// How often the server checks whether the operator is gone or a stop was requested.
const TICK: Duration = Duration::from_millis(200);
/// Time for the last answer to reach the operator when the server stops.
const GRACE: Duration = Duration::from_secs(5);
/// How long the result is kept for an operator whose connection broke.
const KEPT: Duration = Duration::from_secs(30 * 60);

/// A running InitServer.
pub struct InitServer {
    server: Server,
    shared: Arc<Shared>,
}

struct Shared {
    guard: SecretGuard,
    entrant: Entrant,
    node: Arc<NodeParts>,
    job: Job<Done>,
    worker: Mutex<Option<JoinHandle<()>>>,
    is_delivered: AtomicBool,
}

impl InitServer {
    /// Serves on `listener`.
    pub fn start(
        listener: TcpListener,
        issuer: Arc<dyn Issuer>,
        guard: SecretGuard,
        entrant: Entrant,
        node: Arc<NodeParts>,
    ) -> std::io::Result<InitServer> {
        let timeline = node.timeline;
        let job = Job::new(timeline);
        let is_delivered = AtomicBool::new(false);
        let shared = Arc::new(Shared {
            guard,
            entrant,
            node,
            job,
            worker: Mutex::default(),
            is_delivered,
        });
        let handler = shared.clone();
        let router = Router::new().server_streaming(
            INIT,
            move |call: &Call, request: InitRequest, answer: &mut Sender<InitResponse>| match admit(
                call, &request, &handler,
            ) {
                Ok(()) => watch(call, answer, &handler),
                // the status says after how much time the operator's tool should retry
                Err(InitRefused::Busy(pause)) => Err(Status::busy(pause)),
                Err(refused) => answer.send(&failure(refused.code(), &refused)),
            },
        );
        let router = record::serve(router, timeline, clock::is_synchronized);
        let transport = Arc::new(atls::Server::new(Some(issuer), None));
        let limits = Limits {
            message_bytes: MAX_REQUEST,
            ..Limits::default()
        };
        let server = Server::start("init", listener, transport, router, limits)?;
        Ok(InitServer { server, shared })
    }

    /// Waits until an init has ended and the operator has the result, or until the node is stopped.
    pub fn wait(self) -> SetupOutcome {
        let (job, stop) = (&self.shared.job, self.shared.entrant.stop());
        while job.ending().is_none() && (job.has_begun() || !stop.is_stopped()) {
            thread::sleep(TICK);
        }
        let until = Instant::now() + KEPT;
        let is_delivered = || self.shared.is_delivered.load(Ordering::Acquire);
        let what = "the operator to repeat the init and fetch its result";
        self.shared.node.timeline.waiting_for(what, || {
            while job.has_begun() && !is_delivered() && Instant::now() < until && !stop.wait(TICK) {
            }
        });
        self.server.stop(GRACE);
        if let Some(worker) = lock(&self.shared.worker).take() {
            // a panic of the worker has become the job's ending
            let _ = worker.join();
        }
        match job.ending() {
            // the node was stopped after the lock and before the set-up
            None if self.shared.entrant.has_won() => SetupOutcome::Failed(Arc::new(Error::Stopped)),
            None => SetupOutcome::None,
            Some(Ok(_)) => SetupOutcome::Done,
            Some(Err(why)) => SetupOutcome::Failed(why),
        }
    }
}

/// Checks the request and starts the set-up. Returns when a set-up exists that this caller may
/// watch.
fn admit(call: &Call, request: &InitRequest, shared: &Arc<Shared>) -> Result<(), InitRefused> {
    let Shared {
        entrant, node, job, ..
    } = &**shared;
    check_secret(call, request, &shared.guard)?;
    let keys = InitSecrets::new(request)?;
    if entrant.cluster() == Some(keys.cluster) && job.has_begun() {
        return Ok(());
    }
    let init = Init::new(keys, request, node)?;
    match node
        .lock(entrant, init.cluster())
        .ok_or(InitRefused::Stopping)?
    {
        Locking::Taken => {}
        Locking::Already(id) if id == init.cluster() && job.has_begun() => return Ok(()),
        Locking::Already(_) => return Err(InitRefused::Locked),
        Locking::Failed(error) => {
            job.begin();
            job.end(Err(Error::Lock(error)));
            return Ok(());
        }
    }
    job.begin();
    let worker = thread::Builder::new().name("set-up".into()).spawn({
        let shared = shared.clone();
        move || {
            let run = || init.run(&shared.node, shared.entrant.stop(), &shared.job);
            let ending = catch_unwind(AssertUnwindSafe(run));
            shared.job.end(ending.unwrap_or(Err(Error::Defect)));
        }
    });
    match worker {
        Ok(worker) => *lock(&shared.worker) = Some(worker),
        Err(error) => job.end(Err(Error::Thread(error))),
    }
    Ok(())
}

/// Sends the job's result to the caller. If the caller asked for progress, sends each event before
/// it.
fn watch(call: &Call, answer: &mut Sender<InitResponse>, shared: &Shared) -> Result<(), Status> {
    let wants_progress = call.metadata().get(PROGRESS) == Some("1");
    let mut seen = 0;
    loop {
        let (events, ending) = shared.job.watch(seen, TICK);
        seen += events.len();
        for event in events.iter().filter(|_| wants_progress) {
            answer.send(&progress(event))?;
        }
        if let (true, Some(ending)) = (events.is_empty(), ending) {
            answer.send(&response(ending))?;
            shared.is_delivered.store(true, Ordering::Release);
            return Ok(());
        }
        if call.is_cancelled() {
            return Err(Status::new(
                Code::Cancelled,
                "the set-up continues; repeat the same request to watch it",
            ));
        }
    }
}

fn check_secret(
    call: &Call,
    request: &InitRequest,
    guard: &SecretGuard,
) -> Result<(), InitRefused> {
    match guard.check(call.network(), &request.init_secret, || call.is_cancelled()) {
        GuardOutcome::Right => Ok(()),
        GuardOutcome::Wrong => {
            let peer = call
                .peer()
                .map_or("an unknown address".into(), |peer| peer.ip().to_string());
            log::warn!("refused the init request of {peer}: wrong init secret");
            Err(InitRefused::Secret)
        }
        GuardOutcome::Busy(busy) => Err(InitRefused::Busy(busy.retry_after)),
    }
}

fn response(ending: JobResult<Done>) -> InitResponse {
    match ending {
        Ok(Done {
            cluster,
            kubeconfig,
        }) => InitResponse {
            kind: Some(Kind::InitSuccess(InitSuccessResponse {
                kubeconfig: kubeconfig.expose().to_vec(),
                owner_id: vec![],
                cluster_id: cluster.to_vec(),
            })),
        },
        Err(error) => failure(
            Code::Internal,
            format_args!(
                "{error}\nThis node can no longer be initialized: reboot it, and it starts over with an empty disk"
            ),
        ),
    }
}

/// Returns the failure as a message in the stream, with status OK: Constellation's tool shows the
/// text only then.
fn failure(code: Code, why: impl Display) -> InitResponse {
    let error = Status::new(code, why.to_string()).to_string();
    InitResponse {
        kind: Some(Kind::InitFailure(InitFailureResponse { error })),
    }
}

fn progress(event: &JobEvent) -> InitResponse {
    let elapsed_millis = u64::try_from(event.elapsed.as_millis()).unwrap_or(u64::MAX);
    let progress = ProgressResponse {
        phase: event.phase.into(),
        line: event.line.clone(),
        elapsed_millis,
    };
    InitResponse {
        kind: Some(Kind::Progress(progress)),
    }
}
