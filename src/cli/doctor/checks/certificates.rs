//! Certificates: those that servers show, the operator's, the authorities, and the requests of
//! kubelets.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::diagnosis::{Diagnosis, Severity};
use super::super::gathered::Gathered;
use crate::status::objects::{Fate, Request};
use crate::status::served::Validity;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long before its end a certificate is reported.
const NOTICE: Duration = Duration::from_secs(30 * DAY.as_secs());
/// How long before its end an authority is reported.
const NOTICE_OF_AUTHORITY: Duration = Duration::from_secs(365 * DAY.as_secs());
/// How long a request may wait before it is reported.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

/// Returns how urgent the end of a certificate is. A certificate with a short life is replaced
/// later, so at most a tenth of its life counts. The last quarter of the notice is an error.
fn urgency(facts: &Gathered, validity: Validity, notice: Duration) -> Option<Severity> {
    let life = validity.until.duration_since(validity.from);
    let notice = notice.min(life.unwrap_or_default() / 10);
    match validity.until.duration_since(facts.now) {
        Err(_) => Some(Severity::Error),
        Ok(left) if left < notice / 4 => Some(Severity::Error),
        Ok(left) if left < notice => Some(Severity::Warning),
        Ok(_) if validity.from > facts.now => Some(Severity::Error),
        Ok(_) => None,
    }
}

fn of_validity(
    facts: &Gathered,
    object: &str,
    what: &str,
    validity: Validity,
    notice: Duration,
    advice: &str,
) -> Option<Diagnosis> {
    let severity = urgency(facts, validity, notice)?;
    let text = match (validity.until < facts.now, validity.from > facts.now) {
        (true, _) => format!("{what} ended on {}", facts.day(validity.until)),
        (_, true) => format!("{what} begins only on {}", facts.day(validity.from)),
        _ => format!("{what} ends on {}", facts.day(validity.until)),
    };
    Some(Diagnosis {
        severity,
        ..Diagnosis::error(object, text, advice)
    })
}

/// The certificates of servers and of the operator do not end soon, and are of the cluster.
pub fn certificates(facts: &Gathered) -> Vec<Diagnosis> {
    let mut found = vec![];
    found.extend(facts.view.operator.and_then(|validity| {
        let advice = "copy /etc/kubernetes/admin.conf of a control plane after its certificates were renewed (docs/day-two/certificates.md)";
        of_validity(facts, "the kubeconfig", "the operator's certificate", validity, NOTICE, advice)
    }));
    for node in &facts.view.nodes {
        let name = &node.listed.name;
        for (server, served) in node.servers.each() {
            let Some(Ok(served)) = served else {
                continue;
            };
            let advice = match server {
                "kubelet" => {
                    "look for its requests: kubectl get csr; the join service's log says why one is not approved (docs/certificates.md)"
                }
                _ => "renew the certificates of this control plane (docs/day-two/certificates.md)",
            };
            let what = format!("the certificate of its {server}");
            let is_over = served
                .validity
                .is_some_and(|it| it.until < facts.now || it.from > facts.now);
            found.extend(
                served
                    .validity
                    .and_then(|it| of_validity(facts, name, &what, it, NOTICE, advice)),
            );
            // etcd has an authority of its own, which the kubeconfig does not contain
            if let Some(why) = served
                .distrust
                .as_ref()
                .filter(|_| server != "etcd" && !is_over)
            {
                found.push(Diagnosis::error(
                    name,
                    format!("the cluster's authority does not vouch for its {server} at this address: {why}"),
                    "make sure that this address is the node's own, then let the server get a new certificate (docs/certificates.md)",
                ));
            }
        }
    }
    let kubelets = || {
        facts
            .view
            .nodes
            .iter()
            .filter_map(|it| it.servers.kubelet.as_ref())
    };
    if kubelets().next().is_some() && kubelets().all(Result::is_err) {
        found.push(Diagnosis::note(
            "kubelets",
            "none answers this machine, so their certificates and clocks were not checked",
            "run the command where port 10250 of the nodes can be reached",
        ));
    }
    found
}

/// The authorities of the cluster do not end within a year.
pub fn authorities(facts: &Gathered) -> Vec<Diagnosis> {
    let each = facts.view.authorities.iter();
    each.filter_map(|(what, validity)| {
        of_validity(
            facts,
            "the cluster",
            &format!("the {what}"),
            *validity,
            NOTICE_OF_AUTHORITY,
            "plan a new cluster, or a replacement of the authority by hand: kubeadm cannot renew it (docs/day-two/certificates.md)",
        )
    })
    .collect()
}

/// Kubelets get the certificates that they ask for.
pub fn requests(facts: &Gathered) -> Vec<Diagnosis> {
    // of each kubelet and kind the newest decides, because a kubelet asks again
    let mut newest: BTreeMap<(&str, bool), &Request> = BTreeMap::new();
    for request in &facts.view.objects.requests {
        let place = newest
            .entry((&request.user, request.is_serving))
            .or_insert(request);
        if request.made >= place.made {
            *place = request;
        }
    }
    newest
        .into_values()
        .filter_map(|request| of_request(facts, request))
        .collect()
}

fn of_request(facts: &Gathered, request: &Request) -> Option<Diagnosis> {
    let waited = request.made.map_or(Duration::ZERO, |made| facts.age(made));
    let object = format!("certificate request {}", request.name);
    let kind = match request.is_serving {
        true => "serving",
        false => "client",
    };
    let of = format!("{} asks for a {kind} certificate", request.user);
    let minutes = waited.as_secs() / 60;
    match &request.fate {
        Fate::Issued => None,
        Fate::Pending | Fate::Unsigned if waited < PATIENCE => None,
        Fate::Pending => Some(Diagnosis::error(
            object,
            format!("{of}, and nobody has approved it for {minutes} minutes"),
            "look up its keyword, which the join service's log has, in the table of docs/certificates.md#renewal before you decide",
        )),
        Fate::Unsigned => Some(Diagnosis::error(
            object,
            format!("{of}, it was approved, and nobody has signed it for {minutes} minutes"),
            "look at the log of kube-controller-manager, which signs",
        )),
        Fate::Refused(why) => Some(Diagnosis::error(
            object,
            format!("{of}, and it was refused: {why}"),
            "look up the keyword in the table of refusals (docs/certificates.md#renewal)",
        )),
    }
}
