//! Kubernetes Events about nodes, for users of kubectl. They are dropped when too many arrive at once,
//! and no decision waits for one.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::joined::Joined;
use base::crypto::random;
use base::text::hex;
use base::time;
use kubernetes::client::{self, Client, EVENTS};

/// Maximum number of events in the queue.
const QUEUE: usize = 64;
/// Maximum number of events in one burst. One more event is permitted after each `EACH`.
const BURST: u32 = 50;
const EVENT_INTERVAL: Duration = Duration::from_millis(200);
/// How often the sender checks whether it has to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The timeout of sending one event.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Events of objects without a namespace are in this namespace (k8s.io/client-go tools/events).
const NAMESPACE: &str = "default";

/// The queue of the thread that sends events.
#[derive(Clone)]
pub struct Events {
    /// The name of the program.
    reporter: &'static str,
    queue: SyncSender<Value>,
}

/// What an Event says.
pub struct Event<'a> {
    /// What the node asked for, or what happened to it.
    pub action: &'a str,
    /// Whether it is the usual case.
    pub is_normal: bool,
    /// The result, as one word.
    pub title: &'a str,
    /// The rest.
    pub note: &'a str,
}

impl Events {
    /// Starts the thread that sends the events of this program.
    pub fn start(client: &Client, reporter: &'static str) -> io::Result<(Events, Joined)> {
        let (queue, queued) = mpsc::sync_channel(QUEUE);
        let client = client.within(TIMEOUT);
        let thread = thread::Builder::new()
            .name("events".into())
            .spawn(move || send_all(&client, &queued))?;
        Ok((Events { reporter, queue }, Joined::from(thread)))
    }

    /// Queues an event of the node `node`. A request without a node name has no event.
    pub fn send(&self, node: &str, event: &Event<'_>) {
        if !node.is_empty() {
            // An event is dropped when the queue is full.
            let _ = self.queue.try_send(self.object(node, event));
        }
    }

    /// Builds an Event of events.k8s.io/v1.
    fn object(&self, node: &str, event: &Event<'_>) -> Value {
        // The API server accepts at most 1024 characters.
        let note: String = event.note.chars().take(900).collect();
        let number = hex(&random::<8>());
        json!({
            "metadata": {"name": format!("{node}.{number}"), "namespace": NAMESPACE},
            "eventTime": time::micros(SystemTime::now()),
            "reportingController": format!("firstlight/{}", self.reporter),
            "reportingInstance": self.reporter,
            "action": event.action,
            "reason": event.title,
            "type": if event.is_normal { "Normal" } else { "Warning" },
            "note": note,
            "regarding": {"apiVersion": "v1", "kind": "Node", "name": node},
        })
    }
}

fn send_all(client: &Client, queue: &Receiver<Value>) {
    let (mut budget, mut counted, mut logged) = (BURST, Instant::now(), false);
    loop {
        let event = match queue.recv_timeout(STOP_CHECK_INTERVAL) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if !client.is_stopped() => continue,
            Err(_) => return,
        };
        let earned =
            (counted.elapsed().as_millis() / EVENT_INTERVAL.as_millis()).min(BURST.into()) as u32;
        if earned > 0 {
            (budget, counted) = ((budget + earned).min(BURST), Instant::now());
        }
        if budget == 0 {
            continue;
        }
        budget -= 1;
        match client.create(&EVENTS.in_namespace(NAMESPACE), &event) {
            Ok(_) => logged = false,
            Err(client::Error::Stopped) => return,
            Err(error) => {
                if !std::mem::replace(&mut logged, true) {
                    log::warn!("cannot create Events in Kubernetes: {error}");
                }
            }
        }
    }
}
