//! The commands of `firstlight` and their options.

use super::usage::{Command, Operand, Opt, Program, Value};
use super::{
    ATTESTATION_REFUSED, UNREACHABLE, apply, completions, init, man, measure, recover, ssh, status,
};
use base::program::{FAILED, USAGE};

/// All of it.
pub const PROGRAM: Program = Program {
    name: "firstlight",
    summary: "makes confidential virtual machines a cluster, and brings it back",
    commands: &[INIT, APPLY, STATUS, RECOVER, SSH, MEASURE, COMPLETIONS, MAN],
    exit_codes: &[
        (0, "done"),
        (FAILED, "failed, or the node refused"),
        (USAGE, "the arguments make no sense"),
        (
            ATTESTATION_REFUSED,
            "attestation refused: the node is not what the policy wants; the text names register, expected and got",
        ),
        (
            UNREACHABLE,
            "the node was not reached, or did not answer, in the time given",
        ),
    ],
    examples: (
        "from a node's first boot to its recovery",
        &[
            "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt \
             --kubernetes-version v1.32.9",
            "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
            "firstlight recover --endpoint 10.42.1.100 --policy policy.json",
            "firstlight ssh --key ~/.ssh/id_ed25519.pub",
        ],
    ),
};

const INIT: Command = Command {
    name: "init",
    summary: "make a booted node the first of a new cluster",
    about: &[
        "Connects over attested TLS, checks that the node meets the policy, and hands it the master secret. Waits for \
              a node that still boots, and shows what the node does. The work is the node's: when the connection is lost it \
              goes on, and the same command, with the same files, finds it at work and gets the same result.",
        "The node's attestation key must be one that the policy or the command line names. The node's console has the name; \
              `firstlight measure` writes it into the policy.",
        "With --kubernetes-version the node becomes the first control plane of a cluster; without it the node gets its \
              disk's permanent key, and no cluster.",
    ],
    operand: None,
    options: &[
        Opt::needed("endpoint", Value::Text("HOST[:PORT]"), "the node; port 9000 unless given"),
        POLICY,
        Opt::needed(
            "init-secret",
            Value::File,
            "the secret whose hash the node has, in a file that only you may read; - is standard input",
        ),
        Opt::value(
            "master-secret",
            Value::File,
            "made if there is none, mode 0600, never overwritten; who loses it cannot recover the cluster",
        )
        .or(MASTER_SECRET_FILE),
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        Opt::value("state", Value::File, "measurement salt, cluster ID, and the node's attestation key").or(STATE_FILE),
        Opt::value("kubeconfig", Value::File, "where to put the administrator's kubeconfig; must not exist")
            .or(KUBECONFIG_FILE),
        Opt::flag("merge-kubeconfig", "add it to the file that kubectl reads, too ($KUBECONFIG, else ~/.kube/config)"),
        Opt::value("log", Value::File, "what the node says when it fails is added here").or("firstlight-cluster.log"),
        Opt::value("cluster-name", Value::Text("NAME"), "the node's default unless given"),
        Opt::value("kubernetes-version", Value::Text("VERSION"), "the cluster's, from v1.31.0 on"),
        Opt::value(
            "components",
            Value::File,
            "what the node installs first (JSON: url, hash, install_path, extract); for v1.31.13 and v1.32.9 what was \
             released unless given",
        ),
        Opt::value("service-cidr", Value::Text("NETWORK"), "of the services' addresses; 10.96.0.0/12 unless given"),
        Opt::value("pod-cidr", Value::Text("NETWORK"), "of the pods' addresses; their plugin's unless given"),
        Opt::value(
            "apiserver-san",
            Value::Text("NAME"),
            "a further name or address of the API server; may be repeated",
        ),
        IMAGE_OF_INIT,
        CLOUD_PROVIDER,
        METADATA,
        SKIP_WAIT,
        Opt::flag("skip-addons", "leave out kubeadm's CoreDNS and kube-proxy, as for a network that brings its own"),
        Opt::flag("verbose", "show each line that the node tells, not only its phases").short('v'),
        Opt::value("timeout", Value::Text("TIME"), "for everything together, as 90s, 10m or 1h").or("30m"),
    ],
    examples: &[
        "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt \
         --kubernetes-version v1.32.9",
        "pass show cluster/init | firstlight init --endpoint [fd00::1]:9000 --policy policy.json --init-secret -",
    ],
    run: |given| init::run(&super::init_options(given)?),
};

const APPLY: Command = Command {
    name: "apply",
    summary: "bring the services of the control planes into a cluster",
    about: &[
        "Join service and key service, with the master secret and the attestation policy, as the Helm chart in \
         charts/firstlight has them. May be repeated, also with another image or policy: the manifests of before are saved \
         first, into a folder with the date, and where the new ones are refused or do not get ready in time all is made as it \
         was before.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "policy",
            Value::File,
            "the attestation policy that nodes must meet (JSON)",
        ),
        Opt::value(
            "image",
            Value::Text("IMAGE"),
            "a container image with /join-service and /key-service",
        ),
        Opt::value(
            "skip-phases",
            Value::Text("PHASE,.."),
            "what is left as it is: policy, or services, which then need no image",
        ),
        Opt::value("kubeconfig", Value::File, "the administrator's").or(KUBECONFIG_FILE),
        MASTER_SECRET,
        Opt::value("state", Value::File, "has the measurement salt").or(STATE_FILE),
        Opt::value(
            "node-port",
            Value::Text("PORT"),
            "of the join service on every control plane",
        )
        .or("30090"),
        CLOUD_PROVIDER,
        METADATA,
        Opt::value(
            "migrate-until",
            Value::Text("DATE"),
            "the last day, as 2027-01-31, on which the join service opens disks that have no record, as those of the old \
             system; never unless given",
        ),
        Opt::value(
            "backups",
            Value::File,
            "the folder in which that with the manifests of before is made",
        )
        .or("."),
        SKIP_WAIT,
        Opt::value(
            "timeout",
            Value::Text("TIME"),
            "until they are ready, as 90s, 10m or 1h",
        )
        .or("10m"),
        Opt::flag(
            "print",
            "print the manifests (JSON, with the master secret) and ask no cluster",
        ),
    ],
    examples: &[
        "firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0",
        "firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0 --skip-wait",
        "firstlight apply --policy policy-upgrade.json --skip-phases services",
    ],
    run: |given| apply::run(&super::apply_options(given)?),
};

const STATUS: Command = Command {
    name: "status",
    summary: "ask a node where it stands",
    about: &[
        "Asks, at the same time, the three servers that a node can have: the recovery server of one that waits in its \
         initramfs (port 9999), the InitServer of one that waits for its init, or what a member of a cluster has in its place \
         (9000), and the join service of a control plane (30090); with a port, only that one. Says of each whether it \
         answers, whether it meets the policy, and to which cluster it belongs, by PCR 15, or what it waits for.",
        "Exits with 0 for a member of the cluster whose ID is given or in the state file, 3 when a register does not meet the \
         policy, 4 when nobody answers, 5 for a node that waits for the key of its disk, 6 for a fresh one that belongs to no \
         cluster, 7 for a member of another cluster or where the ID is not known, and 8 when only a join service answers, \
         which proves nothing of its node.",
    ],
    operand: Some(Operand {
        value: Value::Text("HOST[:PORT]"),
        help: "the node, or one server of it",
    }),
    options: &[
        POLICY,
        Opt::value(
            "state",
            Value::File,
            "has the cluster's ID, and attestation keys of its nodes; may be missing",
        )
        .or(STATE_FILE),
        Opt::value(
            "cluster-id",
            Value::Text("HEX"),
            "the cluster's ID, in place of that in the state file",
        ),
        Opt::value(
            "timeout",
            Value::Text("TIME"),
            "for everything together, as 90s, 10m or 1h",
        )
        .or("30s"),
    ],
    examples: &[
        "firstlight status 10.42.1.100 --policy policy.json",
        "firstlight status [fd00::1]:9999 --policy policy.json --timeout 5s",
    ],
    run: |given| status::run(&super::status_options(given)?),
};

const RECOVER: Command = Command {
    name: "recover",
    summary: "bring the key to a node that waits for one to open its disk",
    about: &[
        "A node whose cluster cannot let it in again, since no other control plane runs, waits in its initramfs. This \
              command connects to it over attested TLS, checks that it meets the policy, and hands it the master secret; it \
              succeeds once the node has opened its disk. Of several nodes behind one address it recovers one a run.",
        "The node's attestation key must be one that the policy, the state file or the command line names. The state file has \
              those of nodes that were initialised or recovered with it; the others' are on their consoles, and in the \
              records of the cluster while it runs.",
        "When all of a cluster was off, recover control planes until more than half of them run: with those the cluster is \
              back, and lets in the others by itself.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "endpoint",
            Value::Text("HOST[:PORT]"),
            "the node; port 9999 unless given",
        ),
        POLICY,
        MASTER_SECRET,
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        KNOWN_NODES,
        Opt::flag(
            "migrate",
            "open also a disk whose header does not say of which cluster it is, as those of the old system; only for a disk \
             that you know to be this node's; needs the measurement salt of the state file",
        ),
        Opt::flag(
            "status",
            "only ask what the node waits for: the disk, since when, what it tried",
        ),
        TIMEOUT,
    ],
    examples: &[
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json",
    ],
    run: |given| recover::run(&super::recover_options(given)?),
};

const SSH: Command = Command {
    name: "ssh",
    summary: "certify your SSH key for the nodes of a cluster",
    about: &[
        "Who has the master secret is the cluster's SSH certificate authority for users, and that for hosts: this command \
              certifies a key for root on every node, for a day, and makes the nodes known by the certificates that they \
              have. No node is asked. Port 22 must be reachable, which is for the machines' network to decide.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "key",
            Value::File,
            "your public key, of any kind that can be certified: ~/.ssh/id_ed25519.pub",
        ),
        MASTER_SECRET,
        Opt::value(
            "certificate",
            Value::File,
            "where to put the certificate; must not exist",
        )
        .or("firstlight-ssh-cert.pub"),
        Opt::value(
            "known-hosts",
            Value::File,
            "gets a line by which the nodes are known, unless it is there",
        )
        .or("firstlight-known_hosts"),
        Opt::flag(
            "old-hosts",
            "know nodes of the old system, too, whose hosts the authority for users has certified",
        ),
        Opt::flag(
            "overwrite",
            "replace a certificate that is there, as yesterday's",
        ),
    ],
    examples: &[
        "firstlight ssh --key ~/.ssh/id_ed25519.pub",
        "firstlight ssh --key ~/.ssh/id_ed25519.pub --certificate ~/.ssh/id_ed25519-cert.pub --overwrite",
    ],
    run: |given| ssh::run(&super::ssh_options(given)),
};

const MEASURE: Command = Command {
    name: "measure",
    summary: "write the attestation policy that a machine meets",
    about: &[
        "Run on a node of known good software, it prints a policy (JSON) that demands what the TPM's SHA-256 \
              registers hold now. PCR 15 is always in it, as zero, as it is in a node that belongs to no cluster yet. The \
              policy names the machine's attestation key, and accepts no other machine until it names more.",
        "For an upgrade, --add-to prints a policy that also accepts the machine's image: nodes of the old image and of \
              the new one are let in, and none that has some registers of one and some of the other. It also adds the \
              machine's attestation key to a policy that names keys.",
    ],
    operand: None,
    options: &[
        Opt::value(
            "tpm",
            Value::Text("LOCATION"),
            "device:PATH or swtpm:host=ADDRESS,port=PORT; /dev/tpmrm0, else /dev/tpm0, unless given",
        ),
        // boot loader, command line, kernel and initramfs, unified kernel image, its parameters and extensions, and the
        // cluster ID; the others are the firmware's, and change with the host
        Opt::value(
            "pcrs",
            Value::Text("LIST"),
            "the registers to demand; those that the image decides unless given",
        )
        .or("4,8,9,11,12,13,15"),
        Opt::value(
            "add-to",
            Value::File,
            "a policy; it is printed with this image added, and demands its registers",
        ),
        Opt::value(
            "name",
            Value::Text("NAME"),
            "what to call the image, in messages; needed where --add-to adds one",
        ),
        Opt::flag(
            "trust-any-tpm",
            "name no attestation key: machines that are not known yet are let in, and so is a program that has no TPM and \
             says what one would",
        ),
    ],
    examples: &[
        "firstlight measure > policy.json",
        "firstlight measure --tpm swtpm:host=127.0.0.1,port=2321 --pcrs 4,9,15",
        "firstlight measure --add-to policy.json --name 'image 1.3' > policy-upgrade.json",
    ],
    run: |given| measure::run(&super::measure_options(given)?),
};

const COMPLETIONS: Command = Command {
    name: "completions",
    summary: "print what a shell needs to complete these commands",
    about: &["For the running shell, or for a file that it reads when it starts."],
    operand: Some(Operand {
        value: Value::OneOf("SHELL", completions::SHELLS),
        help: "bash, zsh or fish",
    }),
    options: &[],
    examples: &[
        "source <(firstlight completions bash)",
        "firstlight completions zsh > ~/.zfunc/_firstlight",
        "firstlight completions fish > ~/.config/fish/completions/firstlight.fish",
    ],
    run: |given| completions::run(&PROGRAM, given),
};

const MAN: Command = Command {
    name: "man",
    summary: "print the manual page",
    about: &["In mdoc(7), the format of manual pages' sources."],
    operand: None,
    options: &[],
    examples: &["firstlight man > firstlight.1 && man ./firstlight.1"],
    run: |_| man::run(&PROGRAM),
};

const ATTESTATION_KEY: Opt = Opt::value(
    "attestation-key",
    Value::Text("NAME"),
    "accept this attestation key too, named as on the node's console: 000b and 64 hex digits; may be repeated",
);
const TRUST_ANY_TPM: Opt = Opt::flag("trust-any-tpm", ANY_TPM_MEANS);
/// Help, and a warning at each use.
pub const ANY_TPM_MEANS: &str = "accept any attestation key: whoever is reached at that address gets the master secret, \
                                 also a program that has no TPM and says what one would";
const KNOWN_NODES: Opt = Opt::value(
    "state",
    Value::File,
    "has the attestation keys of nodes that are known; may be missing",
)
.or(STATE_FILE);

const MASTER_SECRET_FILE: &str = "firstlight-mastersecret.json";

const STATE_FILE: &str = "firstlight-state.json";
const KUBECONFIG_FILE: &str = "firstlight-admin.conf";

const IMAGE_OF_INIT: Opt = Opt::value(
    "image",
    Value::Text("IMAGE"),
    "a container image with /join-service and /key-service, which are brought into the new cluster; `firstlight apply` does \
     it later unless given",
);
const CLOUD_PROVIDER: Opt = Opt::value(
    "cloud-provider",
    Value::OneOf("CLOUD", &["qemu", "none"]),
    "whose metadata service tells the join service which machines there are, and which are control planes; with none, \
     machines of any name are let in, but no control planes",
)
.or("qemu");
const METADATA: Opt = Opt::value(
    "metadata",
    Value::Text("URL"),
    "where that is, as the control planes reach it: http://HOST[:PORT]; its usual place unless given",
);
const SKIP_WAIT: Opt = Opt::flag(
    "skip-wait",
    "return when the API server has taken the services; nothing is rolled back that never gets ready",
);
const POLICY: Opt = Opt::needed(
    "policy",
    Value::File,
    "the attestation policy that it must meet (JSON)",
);
const MASTER_SECRET: Opt =
    Opt::value("master-secret", Value::File, "the cluster's master secret").or(MASTER_SECRET_FILE);
const TIMEOUT: Opt = Opt::value(
    "timeout",
    Value::Text("TIME"),
    "for everything together, as 90s, 10m or 1h",
)
.or("10m");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_examples_and_every_option_a_use() {
        for command in PROGRAM.commands {
            assert!(!command.examples.is_empty(), "{}", command.name);
            assert!(
                command
                    .examples
                    .iter()
                    .all(|line| line.contains(&format!("firstlight {}", command.name)))
            );
            for option in command.options {
                assert!(
                    !option.help.is_empty() && !option.help.ends_with('.'),
                    "--{}",
                    option.name
                );
                assert!(
                    !option.is_needed || option.default.is_none(),
                    "--{}",
                    option.name
                );
            }
        }
    }
}
