//! Certificates: those that servers show, the operator's, the authorities, and the requests of
//! kubelets.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::diagnosis::{Diagnosis, Severity};
use super::super::gathered::Gathered;
use crate::cluster::{
    status::ends::{EndingCertificate, Holder, Urgency, ending},
    status::objects::{Fate, SigningRequest},
};

/// How long a request may wait before it is reported.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

/// Returns the finding about a certificate that ends.
fn of_ending(ending: EndingCertificate) -> Diagnosis {
    let advice = match ending.holder {
        Holder::Operator => {
            "copy /etc/kubernetes/admin.conf of a control plane after its certificates were renewed (docs/day-two/certificates.md)"
        }
        Holder::Kubelet => {
            "look for its requests: kubectl get csr; the member controller's log says why one is not approved (docs/certificates.md)"
        }
        Holder::ControlPlane => {
            "see the log of firstlight-renew on this control plane, which renews them (docs/day-two/certificates.md)"
        }
        Holder::Authority => {
            "see the log of firstlight-renew on the control planes, which give it a new certificate (docs/day-two/certificates.md)"
        }
    };
    Diagnosis {
        severity: match ending.urgency {
            Urgency::Soon => Severity::Warning,
            Urgency::Now => Severity::Error,
        },
        ..Diagnosis::error(ending.object, ending.text, advice)
    }
}

/// The certificates of servers and of the operator do not end soon, and are of the cluster.
pub fn certificates(facts: &Gathered) -> Vec<Diagnosis> {
    let ending = ending(&facts.view, facts.now).into_iter();
    let leaves = ending.filter(|it| it.holder != Holder::Authority);
    let mut found: Vec<Diagnosis> = leaves.map(of_ending).collect();
    for node in &facts.view.nodes {
        for (server, served) in node.servers.each() {
            let Some(Ok(served)) = served else {
                continue;
            };
            let is_over = served
                .validity
                .is_some_and(|it| it.until < facts.now || it.from > facts.now);
            // etcd has an authority of its own, which the kubeconfig does not contain
            let is_etcd = server.starts_with("etcd");
            if let Some(why) = served.distrust.as_ref().filter(|_| !is_etcd && !is_over) {
                found.push(Diagnosis::error(
                    &node.listed.name,
                    format!("the cluster's authority does not vouch for its {server} at this address: {why}"),
                    "make sure that this address is the node's own, then let the server get a new certificate (docs/certificates.md)",
                ));
            }
        }
    }
    let nodes = facts.view.nodes.iter();
    let kubelets: Vec<_> = nodes.filter_map(|it| it.servers.kubelet.as_ref()).collect();
    if !kubelets.is_empty() && kubelets.iter().all(|it| it.is_err()) {
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
    let ending = ending(&facts.view, facts.now).into_iter();
    let authorities = ending.filter(|it| it.holder == Holder::Authority);
    authorities.map(of_ending).collect()
}

/// Kubelets get the certificates that they ask for.
pub fn requests(facts: &Gathered) -> Vec<Diagnosis> {
    // of each kubelet and kind the newest decides, because a kubelet asks again
    let mut newest: BTreeMap<(&str, bool), &SigningRequest> = BTreeMap::new();
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

fn of_request(facts: &Gathered, request: &SigningRequest) -> Option<Diagnosis> {
    let waited = request.made.map_or(Duration::ZERO, |made| facts.age(made));
    let object = format!("certificate request {}", request.name);
    let kind = if request.is_serving {
        "serving"
    } else {
        "client"
    };
    let of = format!("{} asks for a {kind} certificate", request.user);
    let minutes = waited.as_secs() / 60;
    match &request.fate {
        Fate::Issued => None,
        Fate::Pending | Fate::Unsigned if waited < PATIENCE => None,
        Fate::Pending => Some(Diagnosis::error(
            object,
            format!("{of}: nobody has approved it for {minutes} minutes"),
            "look up its keyword, which the member controller's log has, in the table of docs/certificates.md#renewal before you decide",
        )),
        Fate::Unsigned => Some(Diagnosis::error(
            object,
            format!("{of}: it is approved, but not signed after {minutes} minutes"),
            "look at the log of kube-controller-manager, which signs",
        )),
        Fate::Refused(why) => Some(Diagnosis::error(
            object,
            format!("{of}: it was refused: {why}"),
            "look up the keyword in the table of refusals (docs/certificates.md#renewal)",
        )),
    }
}

/// Only the member controller approves certificates of kubelets.
pub fn approval(facts: &Gathered) -> Vec<Diagnosis> {
    let approving = facts.view.objects.approving.iter();
    let diagnosis = |name: &String| {
        Diagnosis::warning(
            format!("ClusterRoleBinding {name}"),
            "by it, Kubernetes approves certificates of kubelets without a look at their records, also that of a node that was removed or \
             refused",
            format!(
                "once the member controller runs: kubectl delete clusterrolebinding {name} (docs/certificates.md#kubeadms-bindings)"
            ),
        )
    };
    approving.map(diagnosis).collect()
}
