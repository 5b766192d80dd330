//! The nodes of a fleet and their states: a table that is redrawn on a terminal, or else a line for
//! each change; and the report at the end.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::targets::Target;
use crate::shell::{
    error::{self, ATTESTATION_REFUSED, FRESH, OTHER_CLUSTER, UNREACHABLE, WAITS_FOR_KEY},
    progress::{block, human, printable},
};
use crate::workspace::{connect::Endpoint, state::role_name};
use base::machines::Role;
use base::program::FAILED;
use base::sync::lock;
use serde_json::{Value, json};
use verifier::{KeyName, Refusal};

/// Interval at which the table is redrawn.
const TICK: Duration = Duration::from_secs(1);
/// The size of a terminal that does not tell it: columns and rows.
const USUAL: (usize, usize) = (80, 24);

/// The state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecoveryState {
    /// The command asks it for the first time.
    Asking,
    /// It waits for its key, and meets the policy.
    Verified,
    /// The key is on its way.
    KeySent,
    /// It has opened its disk, and continues its boot.
    Opened,
    /// It has got the key, and does not say whether the key opened its disk: a node of Constellation.
    Received,
    /// It is a member of the cluster.
    Member,
    /// No server answers.
    Unreachable,
    /// It waits for no key, and belongs to no cluster.
    Fresh,
    /// It belongs to another cluster.
    OtherCluster,
    /// It does not open its disk with this key.
    Rejected,
    /// It does not meet the policy.
    Refused,
}

impl RecoveryState {
    /// Returns the name for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            RecoveryState::Asking => "asking",
            RecoveryState::Verified => "verified",
            RecoveryState::KeySent => "key-sent",
            RecoveryState::Opened => "opened",
            RecoveryState::Received => "received",
            RecoveryState::Member => "member",
            RecoveryState::Unreachable => "unreachable",
            RecoveryState::Fresh => "fresh",
            RecoveryState::OtherCluster => "other-cluster",
            RecoveryState::Rejected => "rejected",
            RecoveryState::Refused => "refused",
        }
    }

    /// Returns whether the state does not change any more while the command runs.
    fn is_final(self) -> bool {
        use RecoveryState::*;
        matches!(self, Received | Member | OtherCluster | Rejected | Refused)
    }

    /// Returns the exit code of a command that ends while a node is in this state.
    pub fn code(self, is_dry_run: bool) -> u8 {
        match self {
            RecoveryState::Member | RecoveryState::Received => 0,
            RecoveryState::Verified if is_dry_run => 0,
            RecoveryState::Verified => WAITS_FOR_KEY,
            RecoveryState::Asking
            | RecoveryState::KeySent
            | RecoveryState::Opened
            | RecoveryState::Unreachable => UNREACHABLE,
            RecoveryState::Fresh => FRESH,
            RecoveryState::OtherCluster => OTHER_CLUSTER,
            RecoveryState::Rejected => FAILED,
            RecoveryState::Refused => ATTESTATION_REFUSED,
        }
    }
}

/// A node, and what is known about it.
pub struct Row {
    /// Its name, role and addresses.
    pub target: Target,
    /// The address that is shown: the one that answered last.
    pub endpoint: Endpoint,
    /// Its state.
    pub state: RecoveryState,
    /// Since when it has this state.
    pub since: Instant,
    /// Details of the state for the operator, such as an error; may be empty.
    pub note: String,
    /// What does not meet the policy.
    pub refusal: Option<Refusal>,
    /// Its attestation key.
    pub key: Option<KeyName>,
    /// The UUID of its disk; empty if it is unknown.
    pub disk: String,
    /// Whether it was sent the key.
    pub is_sent: bool,
    /// How often it was asked in vain.
    pub tries: u32,
    /// When it is asked again.
    due: Instant,
    is_busy: bool,
}

impl Row {
    fn new(target: Target, endpoint: Endpoint) -> Row {
        let now = Instant::now();
        Row {
            target,
            endpoint,
            state: RecoveryState::Asking,
            since: now,
            note: String::new(),
            refusal: None,
            key: None,
            disk: String::new(),
            is_sent: false,
            tries: 0,
            due: now,
            is_busy: false,
        }
    }

    /// Changes the state. `note` says more about it.
    pub fn becomes(&mut self, state: RecoveryState, note: impl Into<String>) {
        if self.state != state {
            self.since = Instant::now();
        }
        (self.state, self.note) = (state, note.into());
    }

    /// Has the node asked again after this time.
    pub fn again_in(&mut self, pause: Duration) {
        self.due = Instant::now() + pause;
    }

    /// Returns the name, or else the address.
    pub fn title(&self) -> String {
        match self.target.name.as_str() {
            "" => self.endpoint.to_string(),
            name => printable(name),
        }
    }

    /// Returns the order in which nodes are asked.
    fn turn(&self) -> (u8, Instant) {
        let role = match self.target.role {
            Role::ControlPlane => 0,
            Role::Unknown => 1,
            Role::Worker => 2,
        };
        (role, self.due)
    }

    fn cells(&self) -> [String; 4] {
        [
            self.title(),
            self.endpoint.to_string(),
            role_name(self.target.role).into(),
            self.state.name().into(),
        ]
    }

    fn json(&self) -> Value {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        json!({
            "name": text(&self.target.name),
            "address": self.endpoint.to_string(),
            "role": role_name(self.target.role),
            "state": self.state.name(),
            "sent": self.is_sent,
            "disk": text(&self.disk),
            "key": self.key.map(|key| key.to_string()),
            "reason": text(&self.note),
            "refusals": self.refusal.as_ref().map(error::refusals).unwrap_or_default(),
        })
    }
}

/// All nodes.
pub struct Board {
    rows: Mutex<Vec<Row>>,
    changed: Condvar,
    /// Whether the nodes are only verified, so that a verified node is done.
    is_dry_run: bool,
    has_terminal: bool,
    started: Instant,
}

impl Board {
    /// Makes the table of these nodes; those without an address are left out.
    pub fn new(targets: Vec<Target>, is_dry_run: bool) -> Board {
        let row = |target: Target| {
            let endpoint = target.endpoints.first()?.clone();
            Some(Row::new(target, endpoint))
        };
        Board {
            rows: Mutex::new(targets.into_iter().filter_map(row).collect()),
            changed: Condvar::new(),
            is_dry_run,
            has_terminal: io::stderr().is_terminal(),
            started: Instant::now(),
        }
    }

    /// Returns all rows.
    pub fn rows(&self) -> MutexGuard<'_, Vec<Row>> {
        lock(&self.rows)
    }

    /// Waits for a node that is to be asked, and returns its row's number and its addresses; `None` if
    /// all are done, or at the deadline.
    pub fn next(&self, deadline: Instant) -> Option<(usize, Vec<Endpoint>)> {
        let mut rows = self.rows();
        loop {
            let now = Instant::now();
            if now >= deadline || rows.iter().all(|row| self.is_done(row)) {
                return None;
            }
            let open = rows.iter_mut().enumerate();
            let open = open.filter(|(_, row)| !row.is_busy && !self.is_done(row));
            let (due, later): (Vec<_>, Vec<_>) = open.partition(|(_, row)| row.due <= now);
            if let Some((index, row)) = due.into_iter().min_by_key(|(_, row)| row.turn()) {
                row.is_busy = true;
                return Some((index, row.target.endpoints.clone()));
            }
            let first = later.iter().map(|(_, row)| row.due).min();
            let pause = first.unwrap_or(deadline).min(deadline) - now;
            let waited = self.changed.wait_timeout(rows, pause);
            rows = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    fn is_done(&self, row: &Row) -> bool {
        // a dry run asks each node until it answers, or twice
        let is_asked = row.tries >= 2
            || !matches!(
                row.state,
                RecoveryState::Asking | RecoveryState::Unreachable
            );
        row.state.is_final() || (self.is_dry_run && is_asked)
    }

    /// Changes a row. Without a terminal, prints a line if state or note is another one than before.
    pub fn change<T>(&self, index: usize, change: impl FnOnce(&mut Vec<Row>) -> T) -> T {
        let mut rows = self.rows();
        let before = rows.get(index).map(|row| (row.state, row.note.clone()));
        let changed = change(&mut rows);
        let row = rows.get(index).filter(|_| !self.has_terminal);
        if let Some(row) = row
            && before != Some((row.state, row.note.clone()))
        {
            // standard error may be closed
            let _ = writeln!(io::stderr(), "{}", line(row));
        }
        drop(rows);
        self.changed.notify_all();
        changed
    }

    /// Ends a node's turn.
    pub fn release(&self, index: usize) {
        if let Some(row) = self.rows().get_mut(index) {
            row.is_busy = false;
        }
        self.changed.notify_all();
    }

    /// Redraws the table until all nodes are done or the deadline, and removes it.
    pub fn paint(&self, deadline: Instant) {
        if !self.has_terminal {
            return;
        }
        let mut height = 0;
        loop {
            let rows = self.rows();
            let is_over = Instant::now() >= deadline || rows.iter().all(|row| self.is_done(row));
            let err = io::stderr();
            let size = sys::terminal::size(err.as_fd()).unwrap_or(USUAL);
            let lines = if is_over {
                vec![]
            } else {
                live(&rows, self.started.elapsed(), size)
            };
            let mut text = match height {
                0 => "\r\x1b[J".to_owned(),
                up => format!("\r\x1b[{up}A\x1b[J"),
            };
            for line in &lines {
                text.push_str(line);
                text.push('\n');
            }
            height = lines.len();
            // a terminal that is stopped (Ctrl-S) delays no node
            drop(rows);
            let _ = err.lock().write_all(text.as_bytes());
            if is_over {
                return;
            }
            let pause = TICK.min(deadline.saturating_duration_since(Instant::now()));
            drop(self.changed.wait_timeout(self.rows(), pause));
        }
    }

    /// Returns the report for people: the table, and more about each node that is not back.
    pub fn text(&self) -> String {
        let rows = self.rows();
        let heads = ["NODE", "ADDRESS", "ROLE", "STATE"].map(str::to_owned);
        let cells: Vec<[String; 4]> = [heads]
            .into_iter()
            .chain(rows.iter().map(Row::cells))
            .collect();
        let mut text = String::new();
        for line in aligned(&cells) {
            // writing to a string does not fail
            let _ = writeln!(text, "{line}");
        }
        for row in rows.iter() {
            if row.state.code(self.is_dry_run) != 0 && !row.note.is_empty() {
                let note = block(&row.note);
                let _ = writeln!(text, "\n{}: {}:\n    {note}", row.title(), row.state.name());
            }
        }
        text
    }

    /// Returns the report for programs. docs/cli.md describes it.
    pub fn json(&self) -> Vec<Value> {
        self.rows().iter().map(Row::json).collect()
    }
}

/// Returns the line about a change.
fn line(row: &Row) -> String {
    let note = match row.note.as_str() {
        "" => String::new(),
        note => format!(": {}", block(note)),
    };
    let address = match row.target.name.as_str() {
        "" => String::new(),
        _ => format!(" {}", row.endpoint),
    };
    format!("{}{address}: {}{note}", row.title(), row.state.name())
}

/// Returns the lines of a table whose columns are as wide as their longest cell.
fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> Vec<String> {
    let widths: [usize; COLUMNS] = std::array::from_fn(|column| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    });
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Returns the lines for a terminal of this size. If it has too few, it shows the nodes that are most
/// worth a look, and counts the others.
fn live(rows: &[Row], elapsed: Duration, (columns, height): (usize, usize)) -> Vec<String> {
    let count = |rows: &mut dyn Iterator<Item = &Row>| {
        let mut states: Vec<RecoveryState> = rows.map(|row| row.state).collect();
        states.sort();
        let counts = states.chunk_by(RecoveryState::eq);
        let counts = counts.map(|same| format!("{} {}", same.len(), same[0].name()));
        counts.collect::<Vec<_>>().join(", ")
    };
    // the head of the program, the heads of the columns, the count of the others, the cursor
    let room = height.saturating_sub(4).max(1);
    let mut shown: Vec<usize> = (0..rows.len()).collect();
    // those that are back are worth the least
    let worth = |row: &Row| match row.state {
        RecoveryState::Member | RecoveryState::Received => 2,
        RecoveryState::Verified | RecoveryState::Asking => 1,
        _ => 0,
    };
    shown.sort_by_key(|index| (worth(&rows[*index]), *index));
    let mut others = shown.split_off(room.min(shown.len()));
    shown.sort_unstable();
    others.sort_unstable();
    let heads = ["NODE", "ADDRESS", "ROLE", "STATE", "FOR", ""].map(str::to_owned);
    let cells = shown.iter().map(|index| {
        let row = &rows[*index];
        let [name, address, role, state] = row.cells();
        let first = row.note.lines().next().unwrap_or_default();
        [
            name,
            address,
            role,
            state,
            human(row.since.elapsed()),
            printable(first),
        ]
    });
    let cells: Vec<[String; 6]> = [heads].into_iter().chain(cells).collect();
    let total = count(&mut rows.iter());
    let mut lines = vec![format!("{} nodes: {total}; {}", rows.len(), human(elapsed))];
    lines.extend(aligned(&cells));
    if !others.is_empty() {
        let rest = count(&mut others.iter().map(|index| &rows[*index]));
        lines.push(format!("and {} more: {rest}", others.len()));
    }
    // a line that wraps cannot be redrawn, and a character may be two columns wide
    let narrow = |line: String| -> String {
        let narrow = line.chars().map(|c| if c.is_ascii() { c } else { '?' });
        narrow.take(columns.saturating_sub(1)).collect()
    };
    lines.into_iter().map(narrow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize) -> Vec<Row> {
        let row = |number: usize| {
            let endpoint = Endpoint::parse(&format!("10.0.0.{number}"), 9999).unwrap();
            let target = Target {
                name: format!("node-{number}"),
                role: Role::Worker,
                endpoints: vec![endpoint.clone()],
            };
            Row::new(target, endpoint)
        };
        (0..count).map(row).collect()
    }

    #[test]
    fn a_small_terminal_shows_the_nodes_that_need_a_look_and_counts_the_others() {
        let mut rows = rows(40);
        for row in &mut rows {
            row.becomes(RecoveryState::Member, "");
        }
        rows[17].becomes(
            RecoveryState::Refused,
            "PCR 4: expected aa, got bb\u{1f600}\nmore",
        );
        rows[30].becomes(RecoveryState::Unreachable, "x".repeat(200));
        let lines = live(&rows, Duration::from_secs(61), (60, 10));
        assert!(lines.len() < 10, "{lines:?}");
        assert!(lines.iter().all(|line| line.is_ascii() && line.len() < 60));
        assert_eq!(
            lines[0],
            "40 nodes: 38 member, 1 unreachable, 1 refused; 1 min 1 s"
        );
        let has = |text: &str| lines.iter().any(|line| line.contains(text));
        assert!(has("node-17  10.0.0.17:9999  worker  refused"), "{lines:?}");
        assert!(has("node-30"), "{lines:?}");
        assert_eq!(lines.last().unwrap(), "and 34 more: 34 member");
        let all = live(&rows, Duration::ZERO, (200, 100));
        assert_eq!(all.len(), 42);
        assert!(
            all[19].ends_with("PCR 4: expected aa, got bb?"),
            "{}",
            all[19]
        );
    }

    #[test]
    fn a_peers_text_forges_no_line() {
        let mut rows = rows(1);
        rows[0].becomes(RecoveryState::Rejected, "no\nnode-1: member\x1b[2J");
        assert_eq!(
            line(&rows[0]),
            "node-0 10.0.0.0:9999: rejected: no\n    node-1: member\\u001b[2J"
        );
    }
}
