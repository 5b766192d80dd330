//! When the certificates of a cluster end, and how long before that it is time to say so.

use std::time::{Duration, SystemTime};

use base::time::seconds;
use serde_json::{Value, json};

use super::served::Validity;
use super::view::{KUBELET, View};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long before its end a certificate is reported.
const NOTICE: Duration = Duration::from_secs(30 * DAY.as_secs());
/// How long before its end an authority is reported: a replacement takes long.
const NOTICE_OF_AUTHORITY: Duration = Duration::from_secs(365 * DAY.as_secs());

/// Whose certificate it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// The operator, in the kubeconfig.
    Operator,
    /// A kubelet.
    Kubelet,
    /// Another server of Kubernetes, whose certificates kubeadm makes.
    ControlPlane,
    /// An authority of the cluster.
    Authority,
}

/// How urgent the end of a certificate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// It ends soon.
    Soon,
    /// It ends within the last quarter of the notice, has ended, or is not valid yet.
    Now,
}

/// A certificate that needs attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndingCertificate {
    /// The node, or what else has it.
    pub object: String,
    /// Whose it is.
    pub holder: Holder,
    /// When it ends, as a clause.
    pub text: String,
    /// Its last second.
    pub until: SystemTime,
    /// How urgent it is.
    pub urgency: Urgency,
}

impl EndingCertificate {
    /// Returns the JSON for programs.
    pub fn json(&self) -> Value {
        json!({
            "object": self.object,
            "finding": self.text,
            "ends": seconds(self.until),
            "urgent": self.urgency == Urgency::Now,
        })
    }
}

/// Returns the certificates that have ended or end soon, and those that are not valid yet.
pub fn ending(view: &View, now: SystemTime) -> Vec<EndingCertificate> {
    let operator = view.operator.map(|it| {
        let what = "the operator's certificate".to_owned();
        ("the kubeconfig", Holder::Operator, what, it)
    });
    let servers = view.nodes.iter().flat_map(|node| {
        node.servers.certificates().map(|(server, it)| {
            let holder = match server {
                KUBELET => Holder::Kubelet,
                _ => Holder::ControlPlane,
            };
            let what = format!("the certificate of its {server}");
            (node.listed.name.as_str(), holder, what, it)
        })
    });
    let authorities = view.authorities.iter().map(|(what, it)| {
        let what = format!("the {what}");
        ("the cluster", Holder::Authority, what, *it)
    });
    let all = operator.into_iter().chain(servers).chain(authorities);
    all.filter_map(|(object, holder, what, validity)| {
        Some(EndingCertificate {
            object: object.into(),
            holder,
            urgency: urgency(validity, holder, now)?,
            text: clause(&what, validity, now),
            until: validity.until,
        })
    })
    .collect()
}

/// A certificate with a short life is replaced late, so at most a tenth of its life counts.
fn urgency(validity: Validity, holder: Holder, now: SystemTime) -> Option<Urgency> {
    let life = validity.until.duration_since(validity.from);
    let notice = match holder {
        Holder::Authority => NOTICE_OF_AUTHORITY,
        _ => NOTICE,
    };
    let notice = notice.min(life.unwrap_or_default() / 10);
    match validity.until.duration_since(now) {
        Err(_) => Some(Urgency::Now),
        Ok(_) if validity.from > now => Some(Urgency::Now),
        Ok(left) if left < notice / 4 => Some(Urgency::Now),
        Ok(left) if left < notice => Some(Urgency::Soon),
        Ok(_) => None,
    }
}

fn clause(what: &str, validity: Validity, now: SystemTime) -> String {
    match (validity.until < now, validity.from > now) {
        (true, _) => format!("{what} ended on {}", day_from(validity.until, now)),
        (_, true) => format!("{what} begins only on {}", day_from(validity.from, now)),
        _ => format!("{what} ends on {}", day_from(validity.until, now)),
    }
}

/// Returns the day of a time.
pub fn day(at: SystemTime) -> String {
    let mut day = seconds(at);
    day.truncate(10);
    day
}

/// Returns a day and its distance from now: `2027-01-31, in 66 days`.
pub fn day_from(at: SystemTime, now: SystemTime) -> String {
    let day = day(at);
    let days = |time: Duration| match time.as_secs() / DAY.as_secs() {
        1 => "1 day".to_owned(),
        days => format!("{days} days"),
    };
    match at.duration_since(now) {
        Ok(left) if left < DAY => format!("{day}, in less than a day"),
        Ok(left) => format!("{day}, in {}", days(left)),
        Err(past) if past.duration() < DAY => format!("{day}, less than a day ago"),
        Err(past) => format!("{day}, {} ago", days(past.duration())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(days: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + DAY * days as u32
    }

    #[test]
    fn an_authority_is_reported_a_year_before_its_end_and_a_certificate_30_days() {
        let now = at(10_000);
        let ends = |in_days: u64, life: u64| Validity {
            from: at(10_000 + in_days - life),
            until: at(10_000 + in_days),
        };
        for (holder, validity, expected) in [
            (Holder::Authority, ends(366, 3650), None),
            (Holder::Authority, ends(364, 3650), Some(Urgency::Soon)),
            (Holder::Authority, ends(90, 3650), Some(Urgency::Now)),
            (Holder::Kubelet, ends(31, 365), None),
            (Holder::Kubelet, ends(29, 365), Some(Urgency::Soon)),
            (Holder::ControlPlane, ends(7, 365), Some(Urgency::Now)),
            // of 40 days, the kubelet replaces it after 28 at the earliest
            (Holder::Kubelet, ends(5, 40), None),
            (Holder::Operator, ends(3, 40), Some(Urgency::Soon)),
            (Holder::Operator, ends(0, 40), Some(Urgency::Now)),
        ] {
            let got = urgency(validity, holder, now);
            assert_eq!(got, expected, "{holder:?} {validity:?}");
        }
        let (from, until) = (at(10_001), at(10_400));
        assert_eq!(
            urgency(Validity { from, until }, Holder::Kubelet, now),
            Some(Urgency::Now),
            "not valid yet"
        );
    }

    #[test]
    fn a_day_has_its_distance() {
        let now = at(10_000);
        assert_eq!(day_from(at(10_001), now), "1997-05-20, in 1 day");
        let hour = Duration::from_secs(3600);
        assert_eq!(day_from(now - hour, now), "1997-05-18, less than a day ago");
        assert_eq!(day_from(at(9_000), now), "1994-08-23, 1000 days ago");
    }
}
