//! The rules of the watch: what each answer of a node means, and what follows from it. Without I/O,
//! clock and locks.
//!
//! ```text
//!             evidence accepted   its own is refused   another machine answers      no evidence, three times
//! condition   True                False                False                        Unknown; False if it was refused before
//! counts as   good                refused              unproven                     nothing; unproven after `silence`
//! follows     all ends            taint, closed disk   taint                        taint after `silence`
//! ```
//!
//! Two rules protect a cluster from an error in the policy, or in what the verifier needs: nothing new follows
//! before each node was asked under the present policy, and nothing new follows while too many nodes are refused, or too many
//! unproven ([`is_mass`]). These two are counted apart. An attacker who moves addresses, answers for others or cuts them off makes nodes
//! unproven, and none refused: a refusal counts only if the evidence is that of the machine in the node's record, and once
//! for each machine. What is set ends only with evidence that is accepted.

use std::time::{Duration, Instant};

use crate::cluster::node_status::Attested;

/// How often the condition is written although only the time of the evidence has changed.
pub const HEARTBEAT: Duration = Duration::from_secs(3600);
/// Answers without evidence before the node's condition becomes Unknown. A short reboot does not change it.
const TRIES: u32 = 3;
/// The pauses after the first and the second answer without evidence.
const PAUSES: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(60)];
/// The reason of a node that has been silent for too long.
const SILENT: &str = "Silent";
/// The message of each accepted node. It is always the same, so it causes no write.
const ACCEPTED: &str = "the machine in the node's record proves software that the policy accepts";

/// What the operator wants to follow from a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// What happens to a node that is refused.
    pub action: WatchAction,
    /// After which time a node without evidence is treated as a refused one; `None`: never.
    pub silence: Option<Duration>,
    /// The percentage of nodes above which a refusal is one of many, and only reported.
    pub share: u8,
    /// Whether a node that was refused gets neither its disk's key nor a ticket later.
    pub close_disks: bool,
}

/// What happens to a node that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchAction {
    /// Its condition, label, event and metrics say so.
    Report,
    /// It also gets a taint: no new pods are placed on it.
    Taint,
    /// It is also cordoned.
    Cordon,
}

/// Why a node's evidence was refused, or why there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WatchReason {
    /// The reason of a condition, such as `Measurement`.
    pub word: &'static str,
    /// A sentence for a person.
    pub message: String,
}

/// The answer of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAnswer {
    /// The policy accepts its evidence, and it is the machine of its record.
    Accepted,
    /// The policy refuses the evidence of the machine in its record.
    Refused(WatchReason),
    /// Another machine answers where the node should be, or one that does not prove which it is.
    Foreign(WatchReason),
    /// There is no evidence that could be judged. The node's software may be right.
    None(WatchReason),
}

/// What is known about a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// When the policy accepted its evidence last.
    pub good: Option<Instant>,
    /// Why its own evidence was refused last; `None` if it was accepted, or there was none.
    refused: Option<WatchReason>,
    /// What answers in its place; `None` if nothing does.
    foreign: Option<WatchReason>,
    /// The present time without evidence.
    silence: Option<Silence>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Silence {
    since: Instant,
    tries: u32,
    reason: WatchReason,
}

/// How a node counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttestationState {
    /// Its last evidence was accepted.
    Good,
    /// Its own evidence was refused.
    Refused,
    /// Another machine answers in its place, or it was silent for too long.
    Unproven,
    /// Neither is known.
    Open,
}

impl Known {
    /// Returns what is known after an answer.
    pub fn after(self, answer: &NodeAnswer, now: Instant) -> Known {
        match answer {
            NodeAnswer::Accepted => Known {
                good: Some(now),
                ..Known::default()
            },
            NodeAnswer::Refused(reason) => Known {
                refused: Some(reason.clone()),
                foreign: None,
                silence: None,
                ..self
            },
            NodeAnswer::Foreign(reason) => Known {
                foreign: Some(reason.clone()),
                silence: None,
                ..self
            },
            NodeAnswer::None(reason) => {
                let before = self.silence.as_ref();
                let silence = Silence {
                    since: before.map_or(now, |before| before.since),
                    tries: before.map_or(1, |before| before.tries.saturating_add(1)),
                    reason: reason.clone(),
                };
                Known {
                    silence: Some(silence),
                    ..self
                }
            }
        }
    }

    /// Returns how the node counts.
    pub fn standing(&self, rules: &Rules, now: Instant) -> AttestationState {
        if self.refused.is_some() {
            return AttestationState::Refused;
        }
        if self.foreign.is_some() || self.is_silent(rules, now) {
            return AttestationState::Unproven;
        }
        match (&self.good, &self.silence) {
            (Some(_), None) => AttestationState::Good,
            _ => AttestationState::Open,
        }
    }

    /// Returns whether its own evidence was refused, also if there has been none since.
    pub fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Returns whether its own evidence was accepted last, also if there has been none since.
    pub fn was_accepted(&self) -> bool {
        self.good.is_some() && self.refused.is_none()
    }

    /// Notes that the record says that the machine was refused, before it has answered.
    pub fn refused_before(self) -> Known {
        if self != Known::default() {
            self
        } else {
            Known {
                refused: Some(WatchReason {
                    word: "RefusedBefore",
                    message: "the record says that the evidence of the machine was refused".into(),
                }),
                ..self
            }
        }
    }

    fn is_silent(&self, rules: &Rules, now: Instant) -> bool {
        let silence = self.silence.as_ref().zip(rules.silence);
        silence.is_some_and(|(silence, limit)| now.duration_since(silence.since) >= limit)
    }

    /// Returns status, reason and message of the condition; `None` while the condition stays as it is.
    pub fn condition(&self, rules: &Rules, now: Instant) -> Option<(&'static str, WatchReason)> {
        if let Some(reason) = self.refused.as_ref().or(self.foreign.as_ref()) {
            return Some(("False", reason.clone()));
        }
        match &self.silence {
            Some(silence) if self.is_silent(rules, now) => {
                let reason = WatchReason {
                    word: SILENT,
                    message: silence.reason.message.clone(),
                };
                Some(("Unknown", reason))
            }
            Some(silence) if silence.tries >= TRIES => Some(("Unknown", silence.reason.clone())),
            Some(_) => None,
            None => self.good.map(|_| {
                let reason = WatchReason {
                    word: "Accepted",
                    message: ACCEPTED.into(),
                };
                ("True", reason)
            }),
        }
    }

    /// Returns when the node is asked again, without jitter.
    pub fn pause(&self, interval: Duration) -> Duration {
        let tries = self.silence.as_ref().map_or(0, |silence| silence.tries);
        let short = (tries as usize)
            .checked_sub(1)
            .and_then(|at| PAUSES.get(at));
        short.map_or(interval, |short| interval.min(*short))
    }
}

/// How many nodes stand how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Census {
    /// Those whose last evidence was accepted.
    pub good: usize,
    /// Those whose own evidence was refused.
    pub refused: usize,
    /// Those where another machine answers, or none for too long.
    pub unproven: usize,
    /// The others.
    pub open: usize,
}

impl Census {
    /// Adds a node.
    pub fn add(&mut self, standing: AttestationState) {
        match standing {
            AttestationState::Good => self.good += 1,
            AttestationState::Refused => self.refused += 1,
            AttestationState::Unproven => self.unproven += 1,
            AttestationState::Open => self.open += 1,
        }
    }

    /// Removes a node.
    pub fn remove(&mut self, standing: AttestationState) {
        let count = match standing {
            AttestationState::Good => &mut self.good,
            AttestationState::Refused => &mut self.refused,
            AttestationState::Unproven => &mut self.unproven,
            AttestationState::Open => &mut self.open,
        };
        *count = count.saturating_sub(1);
    }
}

/// Returns whether so many are bad that the policy, or something that the verifier needs, is probably at fault: all of
/// them, or more than `share` percent. One bad one of several never is.
pub fn is_mass(good: usize, bad: usize, share: u8) -> bool {
    let judged = good + bad;
    let most = (judged * usize::from(share) / 100).max(1);
    bad > most || (bad == judged && bad > 0)
}

/// What follows at this moment from refusals, or from nodes that prove nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The rules apply.
    Normal,
    /// Not every node was asked under the present policy: what is set stays, nothing is added.
    Waiting,
    /// Too many nodes are bad: what is set stays, nothing is added.
    Mass,
}

/// Returns what the Node object should have, from what it has: label, taint, cordon. The condition is
/// not changed here.
pub fn desired(
    known: &Known,
    rules: &Rules,
    mode: Mode,
    now: Instant,
    present: &Attested,
) -> Attested {
    let mut wanted = present.clone();
    let label = known.condition(rules, now).map(|(status, _)| status);
    if let Some(label) = label {
        wanted.label = Some(label.to_ascii_lowercase());
    }
    let has_any = present.taint.is_some() || present.has_cordoned;
    let is_bad = match (known.standing(rules, now), mode) {
        (AttestationState::Good, _) => false,
        (AttestationState::Refused | AttestationState::Unproven, Mode::Normal) => true,
        // a later mass ends nothing: an attacker could make one
        (AttestationState::Refused | AttestationState::Unproven, Mode::Waiting | Mode::Mass) => {
            return wanted;
        }
        // after a change of the leader, a node that was refused stays so until it proves itself
        (AttestationState::Open, _) if has_any => return wanted,
        (AttestationState::Open, _) => false,
    };
    let value = if known.is_refused() || known.foreign.is_some() {
        "refused"
    } else {
        "silent"
    };
    wanted.taint = (is_bad && rules.action >= WatchAction::Taint).then(|| value.to_owned());
    let cordons = is_bad && rules.action == WatchAction::Cordon;
    match (cordons, present.has_cordoned) {
        // another person's cordon is not ours to end
        (true, false) if !present.is_cordoned => {
            (wanted.is_cordoned, wanted.has_cordoned) = (true, true);
        }
        // the node itself may end a cordon
        (true, true) => wanted.is_cordoned = true,
        (false, true) => (wanted.is_cordoned, wanted.has_cordoned) = (false, false),
        _ => {}
    }
    wanted
}

/// Returns whether the record of the machine should say that it is refused; `None`: it stays as it is.
pub fn closes(known: &Known, rules: &Rules, mode: Mode, now: Instant) -> Option<bool> {
    match known.standing(rules, now) {
        AttestationState::Good => Some(false),
        AttestationState::Refused if rules.close_disks && mode == Mode::Normal => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn rules(action: WatchAction) -> Rules {
        Rules {
            action,
            silence: Some(HOUR),
            share: 20,
            close_disks: false,
        }
    }

    fn refused() -> NodeAnswer {
        NodeAnswer::Refused(WatchReason {
            word: "Measurement",
            message: "PCR 4: expected 1, got 2".into(),
        })
    }

    fn foreign() -> NodeAnswer {
        NodeAnswer::Foreign(WatchReason {
            word: "OtherMachine",
            message: "expected m, got n".into(),
        })
    }

    fn none() -> NodeAnswer {
        NodeAnswer::None(WatchReason {
            word: "Unreachable",
            message: "10.0.0.7:9000: refused".into(),
        })
    }

    fn known(answers: &[NodeAnswer], now: Instant) -> Known {
        let known = Known::default();
        answers
            .iter()
            .fold(known, |known, answer| known.after(answer, now))
    }

    fn condition(known: &Known, now: Instant) -> Option<(&'static str, &'static str)> {
        let condition = known.condition(&rules(WatchAction::Taint), now);
        condition.map(|(status, reason)| (status, reason.word))
    }

    #[test]
    fn the_condition_follows_the_answers() {
        let now = Instant::now();
        let of = |answers: &[NodeAnswer]| condition(&known(answers, now), now);
        let (good, bad, none) = (NodeAnswer::Accepted, refused(), none());
        let unreachable = Some(("Unknown", "Unreachable"));
        assert_eq!(of(&[]), None);
        assert_eq!(of(std::slice::from_ref(&good)), Some(("True", "Accepted")));
        assert_eq!(
            of(std::slice::from_ref(&bad)),
            Some(("False", "Measurement"))
        );
        assert_eq!(of(&[bad.clone(), good.clone()]), Some(("True", "Accepted")));
        // a node that reboots
        assert_eq!(of(std::slice::from_ref(&none)), None);
        let [one, two] = [none.clone(), none.clone()];
        assert_eq!(of(&[good.clone(), one.clone(), two.clone()]), None);
        let three = [good, one.clone(), two.clone(), none.clone()];
        assert_eq!(of(&three), unreachable);
        // silence does not make a refused node a better one
        let silent = [bad.clone(), one, two, none];
        assert_eq!(of(&silent), Some(("False", "Measurement")));
        // nor does another machine in its place
        let other = Some(("False", "OtherMachine"));
        assert_eq!(of(&[foreign()]), other);
        assert_eq!(of(&[bad, foreign()]), Some(("False", "Measurement")));
        assert_eq!(
            of(&[foreign(), NodeAnswer::Accepted]),
            Some(("True", "Accepted"))
        );
    }

    #[test]
    fn a_silent_node_counts_as_refused_after_its_time() {
        let now = Instant::now();
        let silent = known(&[NodeAnswer::Accepted, none(), none()], now);
        let rules = rules(WatchAction::Taint);
        assert_eq!(
            silent.standing(&rules, now + HOUR - PAUSES[0]),
            AttestationState::Open
        );
        assert_eq!(
            silent.standing(&rules, now + HOUR),
            AttestationState::Unproven
        );
        assert_eq!(condition(&silent, now + HOUR), Some(("Unknown", SILENT)));
        let never = Rules {
            silence: None,
            ..rules
        };
        assert_eq!(
            silent.standing(&never, now + 1000 * HOUR),
            AttestationState::Open
        );
        // the time begins with the first answer that is missing, and ends with evidence
        let again = silent.clone().after(&none(), now + HOUR / 2);
        assert_eq!(
            again.standing(&rules, now + HOUR),
            AttestationState::Unproven
        );
        let good = again.after(&NodeAnswer::Accepted, now + HOUR);
        assert_eq!(
            good.standing(&rules, now + 9 * HOUR),
            AttestationState::Good
        );
    }

    #[test]
    fn a_node_without_evidence_is_asked_again_soon_at_first() {
        let now = Instant::now();
        let pause = |answers: &[NodeAnswer], interval| known(answers, now).pause(interval);
        assert_eq!(pause(&[NodeAnswer::Accepted], HOUR), HOUR);
        assert_eq!(pause(&[refused()], HOUR), HOUR);
        assert_eq!(pause(&[none()], HOUR), PAUSES[0]);
        assert_eq!(pause(&[none(), none()], HOUR), PAUSES[1]);
        assert_eq!(pause(&[none(), none(), none()], HOUR), HOUR);
        let second = Duration::from_secs(1);
        assert_eq!(pause(&[none()], second), second);
    }

    #[test]
    fn a_mass_is_all_nodes_or_more_than_the_share_but_never_one_of_several() {
        for (good, bad, expected) in [
            (0, 0, false),
            (5, 0, false),
            (0, 1, true),
            (1, 1, false),
            (2, 1, false),
            (1, 2, true),
            (8, 2, false),
            (7, 3, true),
            (8000, 2000, false),
            (7999, 2001, true),
        ] {
            assert_eq!(is_mass(good, bad, 20), expected, "{good} {bad}");
        }
        assert!(is_mass(0, 10, 100) && !is_mass(1, 9, 100));
        assert!(is_mass(98, 2, 0) && !is_mass(99, 1, 0));
    }

    /// What the taint and the cordon of a node become.
    fn becomes(
        answers: &[NodeAnswer],
        action: WatchAction,
        mode: Mode,
        present: &Attested,
    ) -> Attested {
        let now = Instant::now();
        desired(&known(answers, now), &rules(action), mode, now, present)
    }

    #[test]
    fn what_follows_is_what_the_operator_wants() {
        let fresh = Attested::default();
        let of = |action| becomes(&[refused()], action, Mode::Normal, &fresh);
        let reported = Attested {
            label: Some("false".into()),
            ..Attested::default()
        };
        let tainted = Attested {
            taint: Some("refused".into()),
            ..reported.clone()
        };
        let cordoned = Attested {
            is_cordoned: true,
            has_cordoned: true,
            ..tainted.clone()
        };
        assert_eq!(of(WatchAction::Report), reported);
        assert_eq!(of(WatchAction::Taint), tainted);
        assert_eq!(of(WatchAction::Cordon), cordoned);
        // evidence that is accepted ends it
        let good = Attested {
            label: Some("true".into()),
            ..Attested::default()
        };
        let of = |present| {
            becomes(
                &[NodeAnswer::Accepted],
                WatchAction::Cordon,
                Mode::Normal,
                present,
            )
        };
        assert_eq!(of(&cordoned), good);
        // an administrator's cordon stays, also that of a node that is refused
        let own = Attested {
            is_cordoned: true,
            ..Attested::default()
        };
        assert!(of(&own).is_cordoned);
        let both = becomes(&[refused()], WatchAction::Cordon, Mode::Normal, &own);
        assert!(both.is_cordoned && !both.has_cordoned && both.taint.is_some());
        // a node that ends its cordon gets it again
        let ended = Attested {
            is_cordoned: false,
            ..cordoned.clone()
        };
        let again = becomes(&[refused()], WatchAction::Cordon, Mode::Normal, &ended);
        assert_eq!(again, cordoned);
    }

    #[test]
    fn nothing_follows_from_many_refusals_or_before_all_were_asked() {
        let tainted = Attested {
            label: Some("false".into()),
            taint: Some("refused".into()),
            ..Attested::default()
        };
        let bad = [refused()];
        let of = |mode, present| becomes(&bad, WatchAction::Taint, mode, present).taint;
        let fresh = Attested::default();
        assert_eq!(of(Mode::Waiting, &fresh), None);
        assert_eq!(of(Mode::Waiting, &tainted), Some("refused".into()));
        assert_eq!(of(Mode::Mass, &fresh), None);
        // somebody could make a mass to end what is set
        assert_eq!(of(Mode::Mass, &tainted), Some("refused".into()));
        let good = [NodeAnswer::Accepted];
        let ended = becomes(&good, WatchAction::Taint, Mode::Mass, &tainted);
        assert_eq!(ended.taint, None);
        // the result is shown all the same
        let shown = becomes(&bad, WatchAction::Taint, Mode::Mass, &fresh);
        assert_eq!(shown.label.as_deref(), Some("false"));
        // a new leader does not know why a node has a taint: it stays until there is evidence
        let silent = becomes(&[none()], WatchAction::Taint, Mode::Normal, &tainted);
        assert_eq!(silent, tainted);
    }

    #[test]
    fn only_a_refusal_of_the_machine_itself_closes_its_disk_and_only_if_the_operator_wants_it() {
        let now = Instant::now();
        let wanted = Rules {
            close_disks: true,
            ..rules(WatchAction::Report)
        };
        let of = |answers: &[NodeAnswer], rules: &Rules, mode, at| {
            closes(&known(answers, now), rules, mode, at)
        };
        let bad = [refused()];
        assert_eq!(of(&bad, &wanted, Mode::Normal, now), Some(true));
        assert_eq!(
            of(&bad, &rules(WatchAction::Cordon), Mode::Normal, now),
            None
        );
        assert_eq!(of(&bad, &wanted, Mode::Mass, now), None);
        assert_eq!(of(&bad, &wanted, Mode::Waiting, now), None);
        let silent = [NodeAnswer::Accepted, none(), none()];
        assert_eq!(of(&silent, &wanted, Mode::Normal, now + HOUR), None);
        // it says nothing about the machine in the record
        assert_eq!(of(&[foreign()], &wanted, Mode::Normal, now), None);
        // and does not open what its own evidence has closed
        let both = [bad[0].clone(), foreign()];
        assert_eq!(of(&both, &wanted, Mode::Normal, now), Some(true));
        assert_eq!(
            of(&[NodeAnswer::Accepted], &wanted, Mode::Mass, now),
            Some(false)
        );
    }

    #[test]
    fn another_machine_in_its_place_taints_a_node() {
        let tainted = becomes(
            &[foreign()],
            WatchAction::Taint,
            Mode::Normal,
            &Attested::default(),
        );
        assert_eq!(tainted.taint.as_deref(), Some("refused"));
        assert_eq!(tainted.label.as_deref(), Some("false"));
    }

    #[test]
    fn a_machine_that_its_record_calls_refused_is_so_until_its_evidence_is_accepted() {
        let now = Instant::now();
        let known = |answers: &[NodeAnswer]| {
            let before = Known::default().refused_before();
            answers
                .iter()
                .fold(before, |known, answer| known.after(answer, now))
        };
        let rules = rules(WatchAction::Taint);
        let standing = |answers: &[NodeAnswer]| known(answers).standing(&rules, now);
        assert_eq!(standing(&[none()]), AttestationState::Refused);
        assert_eq!(standing(&[NodeAnswer::Accepted]), AttestationState::Good);
        let later = Known::default().after(&NodeAnswer::Accepted, now);
        assert_eq!(later.clone().refused_before(), later);
    }
}
