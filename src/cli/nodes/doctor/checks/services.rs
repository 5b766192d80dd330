//! The services of the control planes: whether they run, what they require, and what they still
//! permit.

use std::collections::BTreeMap;
use std::time::Duration;

use kubernetes::readiness;
use kubernetes::services::TICKET_GROUP;
use kubernetes::services::command_line;
use kubernetes::services::migration::Migration;
use verifier::Policy;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::{Gathered, image_of};
use crate::cluster::{
    apply,
    status::objects::{Expiration, WaitingToken, is_of_set},
};
use crate::trust::policy;

const SERVICES: [&str; 3] = ["join-service", "key-service", MEMBER_CONTROLLER];
const MEMBER_CONTROLLER: &str = "member-controller";
/// The age at which collateral is no longer fresh.
const STALE: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// How many differences of two policies are shown.
const SHOWN: usize = 5;
/// The command that prints the policy in force.
const IN_FORCE: &str =
    "kubectl -n kube-system get configmap join-config -o jsonpath={.data.attestationConfig}";
/// The group of kubeadm's bootstrap tokens, which any machine may use.
const KUBEADM_GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";

/// The services run on each control plane, from one image.
pub fn services(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let nodes = facts.view.nodes.iter();
    let control_planes = nodes.filter(|node| node.listed.is_control_plane).count() as u64;
    let mut found = vec![];
    let is_constellation = |name: &str| {
        let set = objects.service(name);
        set.is_some_and(|set| !command_line(set).contains(&"--log-format"))
    };
    // join services of earlier versions, and of Constellation, do its work
    let needs_no_controller =
        is_constellation("join-service") || objects.option_of("join-service", "--watch").is_some();
    for name in SERVICES {
        let Some(set) = objects.service(name) else {
            if name == MEMBER_CONTROLLER && needs_no_controller {
                continue;
            }
            let effect = match name {
                MEMBER_CONTROLLER => "kubelets get no certificates, and no member is watched",
                _ => "no node gets a ticket, and none that reboots gets the key of its disk",
            };
            found.push(Diagnosis::error(
                format!("DaemonSet kube-system/{name}"),
                format!("it does not exist: {effect}"),
                format!(
                    "{} installs the services (docs/services.md)",
                    facts.apply("")
                ),
            ));
            continue;
        };
        if let Some(missing) = readiness::missing_of(set) {
            let pods = objects.pods.iter();
            let of_set = pods.filter(|pod| is_of_set(pod, set));
            let why: Vec<String> = of_set.flat_map(readiness::troubles_of).collect();
            let text = if why.is_empty() {
                missing
            } else {
                format!("{missing}; {}", why.join("; "))
            };
            found.push(Diagnosis::error(
                format!("DaemonSet kube-system/{name}"),
                text,
                format!("kubectl -n kube-system logs --selector k8s-app={name} --prefix (docs/troubleshooting.md#the-services)"),
            ));
        }
        let wanted = u64::try_from(set.status.desired_number_scheduled).unwrap_or_default();
        if wanted < control_planes {
            found.push(Diagnosis::warning(
                format!("DaemonSet kube-system/{name}"),
                format!("it may run on {wanted} of {control_planes} control planes"),
                "compare its nodeSelector and affinity with the labels of the control planes (charts/firstlight/README.md)",
            ));
        }
    }
    found.extend(one_image(facts));
    if is_constellation("join-service") {
        found.push(Diagnosis::note(
            "DaemonSet kube-system/join-service",
            "its command line is not that of Firstlight's chart, so its options were not checked",
            "for a cluster of Constellation: docs/migration.md",
        ));
    }
    found
}

/// The services have the same image.
fn one_image(facts: &Gathered) -> Option<Diagnosis> {
    let images = SERVICES.map(|name| facts.view.objects.service(name).map(image_of));
    let [Some(join), Some(key), controller] = &images else {
        return None;
    };
    if join == key && controller.as_ref().is_none_or(|it| it == join) {
        return None;
    }
    let controller = controller.as_ref();
    let controller = controller.map(|it| format!(", the member controller {it}"));
    Some(Diagnosis::warning(
        "the services",
        format!(
            "the join service has the image {join}, the key service {key}{}",
            controller.unwrap_or_default()
        ),
        format!(
            "finish the upgrade: firstlight apply --policy {} --image IMAGE, with the new one",
            facts.policy_file.display()
        ),
    ))
}

/// The policy in force is the operator's, can be read, and pins what a machine is.
pub fn policy(facts: &Gathered) -> Vec<Diagnosis> {
    let file = facts.policy_file.display().to_string();
    let mut found = vec![];
    let Some(text) = &facts.view.objects.policy else {
        return vec![Diagnosis::error(
            "ConfigMap kube-system/join-config",
            "it has no attestation policy, so the join service admits no node",
            facts.apply_policy(""),
        )];
    };
    let in_force = match Policy::from_json(text) {
        Ok(policy) => policy,
        Err(error) => {
            return vec![Diagnosis::error(
                "ConfigMap kube-system/join-config",
                format!("its policy cannot be used, so the services keep the one before: {error}"),
                format!(
                    "firstlight policy check {file}, then {}",
                    facts.apply_policy("")
                ),
            )];
        }
    };
    // what apply would put in force: also the keys of known nodes, and the requirement that it keeps
    let known = facts.known.iter().copied();
    let wanted = apply::policy_of(facts.policy.clone(), known, apply::keeps_strong(text));
    let wanted = wanted.unwrap_or_else(|_| facts.policy.clone());
    let differences = policy::differences(&in_force, &wanted);
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(SHOWN);
        let mut shown: Vec<String> = differences.into_iter().take(SHOWN).collect();
        if more > 0 {
            shown.push(format!("and {more} more"));
        }
        found.push(Diagnosis::warning(
            "the policy in force",
            format!("it differs from {file}: {}", shown.join("; ")),
            format!(
                "compare them: {IN_FORCE} | firstlight policy diff - {file}; if the file is right: {}; else take the one in force \
                 (docs/day-two/secrets.md#other-files-are-lost)",
                facts.apply_policy("")
            ),
        ));
    }
    let checked = policy::found(&in_force, facts.variant);
    for error in checked.errors {
        found.push(Diagnosis::error(
            "the policy in force",
            error,
            "measure the image again (docs/measure.md), and apply the new policy",
        ));
    }
    // `old_form` looks at the form of attested TLS, and a note below at the TPM
    let said = ["the form of attested TLS", "the attestation key"];
    let is_other = |open: &String| said.iter().all(|said| !open.starts_with(said));
    let open: Vec<String> = checked.open.into_iter().filter(is_other).collect();
    if !open.is_empty() {
        found.push(Diagnosis::note(
            "the policy in force",
            format!("not pinned: {}", open.join("; ")),
            "pin what your image and platform permit (docs/policy.md)",
        ));
    }
    if policy::accepts_any_tpm(&in_force, facts.variant) {
        // if the operator's file accepts it too, the operator has chosen so; if not, that is a difference
        found.push(Diagnosis::note(
            "the policy in force",
            "any TPM is accepted, and so is a program that only simulates one",
            format!("name the keys of your machines: firstlight policy add-key {file} KEY, then apply it (docs/init.md#before)"),
        ));
    }
    found.extend(images(facts, &in_force));
    found
}

/// Returns a finding if the policy accepts several images.
fn images(facts: &Gathered, in_force: &Policy) -> Option<Diagnosis> {
    let count = in_force.images().len();
    if count < 2 {
        return None;
    }
    let mut running: BTreeMap<&str, usize> = BTreeMap::new();
    for image in facts.view.nodes.iter().filter_map(|it| it.report.image()) {
        *running.entry(image).or_default() += 1;
    }
    let running = running.iter().map(|(image, nodes)| match nodes {
        1 => format!("1 node runs {image}"),
        _ => format!("{nodes} nodes run {image}"),
    });
    let running: Vec<String> = running.collect();
    Some(Diagnosis::note(
        "the policy in force",
        format!("it accepts {count} images: {}", running.join(", ")),
        "when no node runs the old one any more, apply a policy without it (docs/services.md#two-images-at-once)",
    ))
}

/// Returns the last day in an option of a service, and whether it is still to come.
fn until(facts: &Gathered, service: &str, option: &str) -> Option<(String, bool)> {
    let text = facts.view.objects.option_of(service, option)?;
    let is_on = text
        .parse::<Migration>()
        .is_ok_and(|it| it.is_on(facts.now));
    Some((text, is_on))
}

/// The key service gives no keys to clients without a token.
pub fn old_clients(facts: &Gathered) -> Vec<Diagnosis> {
    let advice = format!(
        "when no driver of Constellation is left: {} (docs/storage.md#drivers-of-constellation)",
        facts.apply("--old-clients-until never")
    );
    match until(facts, "key-service", "--old-clients-until") {
        Some((day, true)) => vec![Diagnosis::warning(
            "DaemonSet kube-system/key-service",
            format!("clients without a token get keys of volumes through {day}"),
            advice,
        )],
        Some((day, false)) => vec![Diagnosis::note(
            "DaemonSet kube-system/key-service",
            format!("clients without a token got keys of volumes through {day}"),
            advice,
        )],
        None => vec![],
    }
}

/// The join service opens no disks without a record.
pub fn migration(facts: &Gathered) -> Vec<Diagnosis> {
    let advice = format!(
        "when each node has restarted once: {} (docs/join.md#disks-from-before)",
        facts.apply("--migrate-until never")
    );
    match until(facts, "join-service", "--migrate-until") {
        Some((day, true)) => vec![Diagnosis::warning(
            "DaemonSet kube-system/join-service",
            format!("disks without a record are opened through {day}"),
            advice,
        )],
        Some((day, false)) => vec![Diagnosis::note(
            "DaemonSet kube-system/join-service",
            format!("disks without a record were opened through {day}"),
            advice,
        )],
        None => vec![],
    }
}

/// Keys are not sent in plaintext to callers that nobody authenticates.
pub fn plaintext(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let words = |name: &str| objects.service(name).map(command_line).unwrap_or_default();
    let advice = format!(
        "{} replaces the services by those that authenticate each other (docs/services.md#who-gets-which-keys)",
        facts.apply("")
    );
    let mut found = vec![];
    let key = words("key-service");
    let is_old = !key.is_empty() && !key.iter().any(|word| word.starts_with("--clients"));
    let clients = objects.option_of("key-service", "--clients");
    if is_old || clients.as_deref() == Some("any") {
        found.push(Diagnosis::error(
            "DaemonSet kube-system/key-service",
            "it gives every key to every caller that reaches it, in plaintext",
            advice.as_str(),
        ));
    }
    let join = words("join-service");
    let auth = objects.option_of("join-service", "--key-service-auth");
    let is_old = !join.is_empty() && auth.is_none();
    if is_old || auth.as_deref() == Some("none") {
        found.push(Diagnosis::error(
            "DaemonSet kube-system/join-service",
            "it takes keys in plaintext from any server that answers for the key service",
            advice.as_str(),
        ));
    }
    found
}

/// The join service requires the strong form of attested TLS.
pub fn old_form(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let Some(set) = objects.service("join-service") else {
        return vec![];
    };
    // without a policy that can be read, the check of the policy says so
    let policy = objects.policy.as_deref().map(Policy::from_json);
    let is_open = matches!(policy, Some(Ok(policy)) if !policy.requires_strong());
    let by_option = objects.option_of("join-service", "--require").as_deref() == Some("strong");
    let mut found = vec![];
    if is_open && !by_option {
        found.push(Diagnosis::note(
            "DaemonSet kube-system/join-service",
            "it admits nodes by the old form of attested TLS, whose evidence another machine can pass on",
            format!(
                "when no node is of Constellation: {} (docs/join.md#the-service-proves-itself)",
                facts.apply_policy("--require strong")
            ),
        ));
    }
    let has_no_evidence = |word: &[&str]| word == ["--evidence", ""];
    if command_line(set).windows(2).any(has_no_evidence) {
        found.push(Diagnosis::warning(
            "DaemonSet kube-system/join-service",
            "it does not prove its machine to nodes (joinService.evidence is empty): nodes with require=strong cannot join",
            "set the value to the chart's default (docs/verify.md#a-join-service-without-evidence)",
        ));
    }
    found
}

/// Revocation lists and Intel's collateral are fresh.
pub fn collateral(facts: &Gathered) -> Vec<Diagnosis> {
    let items = facts.view.objects.collateral.iter();
    // the certificate of a chip does not change
    let aging = items.filter(|(name, _)| name.ends_with(".crl") || name.starts_with("tdx-"));
    let oldest = aging.min_by_key(|(_, at)| *at);
    let stale = oldest.filter(|(_, at)| facts.age(*at) > STALE);
    let finding = stale.map(|(name, at)| {
        Diagnosis::note(
            "ConfigMap kube-system/join-collateral",
            format!("{name} was fetched on {}", facts.day(*at)),
            "nothing, if no machine of that kind joined since; otherwise the join service must reach the servers of AMD and Intel, or yours \
             (docs/collateral.md)",
        )
    });
    finding.into_iter().collect()
}

/// The Secret of Constellation and of earlier versions, which has the master secret as it is.
const NOT_ENCRYPTED: &str = "constellation-mastersecret";

/// The cluster keeps the master secret in one immutable Secret, which only control planes can decrypt.
pub fn master_secret(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let used = objects.service("key-service").and_then(|set| {
        let mut volumes = set.spec.template.spec.volumes.iter();
        let config = volumes.find(|volume| volume.name == "config")?;
        Some(config.secret.secret_name.as_str())
    });
    let Some(used) = used.filter(|used| !used.is_empty()) else {
        return vec![];
    };
    let mut found = vec![];
    let secret = |name: &str| format!("Secret kube-system/{name}");
    let known = objects.master_secrets.iter().find(|(name, _)| name == used);
    let is_ours = used.starts_with("constellation-") || used.starts_with("firstlight-");
    match known {
        // the operator's own Secret has a name that is not looked for
        None if !is_ours => {}
        None => found.push(Diagnosis::error(
            secret(used),
            "the key service uses it, and it does not exist: its pods do not start again",
            format!(
                "make it again from your file: {} (docs/day-two/secrets.md)",
                facts.apply("")
            ),
        )),
        Some(_) if used == NOT_ENCRYPTED => found.push(Diagnosis::warning(
            secret(used),
            "it is not encrypted: each reader of this Secret, and of a backup of etcd, has all keys of the cluster",
            format!("{} encrypts it for the control planes", facts.apply("")),
        )),
        Some((_, false)) => found.push(Diagnosis::warning(
            secret(used),
            "it is not immutable: with another content no disk of the cluster opens",
            format!("{} makes it immutable again", facts.apply("")),
        )),
        Some((_, true)) => {}
    }
    for (other, _) in objects
        .master_secrets
        .iter()
        .filter(|(name, _)| name != used)
    {
        found.push(Diagnosis::warning(
            secret(other),
            format!("it has the master secret too, and the key service uses {used}"),
            "when the key service runs with the other one, delete this Secret (docs/kms.md#steps)",
        ));
    }
    found
}

/// No bootstrap token lets a machine join without attestation.
pub fn bootstrap_tokens(facts: &Gathered) -> Vec<Diagnosis> {
    let tokens = facts.view.objects.tokens.iter();
    let usable = tokens.filter(|token| token.authenticates);
    usable.filter_map(|token| of_token(facts, token)).collect()
}

fn of_token(facts: &Gathered, token: &WaitingToken) -> Option<Diagnosis> {
    let object = format!("Secret kube-system/bootstrap-token-{}", token.id);
    let delete = format!(
        "kubectl -n kube-system delete secret bootstrap-token-{}",
        token.id
    );
    let until = match token.expires {
        Expiration::At(at) if at <= facts.now => return None,
        Expiration::At(at) => format!("until {}", facts.day(at)),
        Expiration::Never => "for ever".to_owned(),
        Expiration::Unreadable => {
            return Some(Diagnosis::note(
                object,
                "its expiration is not a time, so the API server does not accept the token",
                format!("if nothing needs it: {delete}"),
            ));
        }
    };
    let groups: Vec<&str> = token
        .groups
        .split(',')
        .filter(|it| !it.is_empty())
        .collect();
    if groups.contains(&KUBEADM_GROUP) {
        return Some(Diagnosis::warning(
            object,
            format!(
                "with this token a machine joins without attestation, {until}: its group is {KUBEADM_GROUP}, that of tickets is {TICKET_GROUP}"
            ),
            format!("unless Constellation's join service made it a moment ago: {delete}"),
        ));
    }
    if groups == [TICKET_GROUP] {
        return None;
    }
    let groups = match groups.as_slice() {
        [] => "no group but system:bootstrappers".to_owned(),
        groups => format!("the groups {}", groups.join(", ")),
    };
    Some(Diagnosis::note(
        object,
        format!(
            "it is valid {until}, and has {groups}: what a machine may do with it depends on the bindings of its groups"
        ),
        format!("if you did not make it, or nothing needs it any more: {delete}"),
    ))
}
