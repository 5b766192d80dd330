//! The commands of `firstlight` and their options.

use super::output::{OUTPUT, Output};
use super::usage::{Command, HELP, Operand, Opt, Program, VERSION, Value};
use super::{
    ATTESTATION_REFUSED, UNREACHABLE, apply, completions, components, explain, hash_secret, init,
    man, measure, metadata, policy, recover, roots, share, ssh, status, timeline, upgrade, verify,
    version, wrap,
};
use base::program::{FAILED, USAGE};
use verifier::variant;

/// The program with all its commands.
pub const PROGRAM: Program = Program {
    name: "firstlight",
    summary: "makes a Kubernetes cluster of confidential virtual machines, and recovers it",
    commands: &[
        INIT,
        APPLY,
        STATUS,
        VERIFY,
        EXPLAIN,
        TIMELINE,
        RECOVER,
        SSH,
        MEASURE,
        POLICY_FILE,
        ROOTS,
        COLLATERAL,
        COMPONENTS,
        UPGRADE,
        METADATA_SERVICE,
        HASH_SECRET,
        SHARE,
        WRAP,
        UNWRAP,
        COMPLETIONS,
        MAN,
        VERSION_COMMAND,
    ],
    options: &[HELP, VERSION, OUTPUT],
    exit_codes: &[
        (0, "success"),
        (FAILED, "the command failed, or the node refused"),
        (USAGE, "the arguments are invalid"),
        (
            ATTESTATION_REFUSED,
            "attestation refused: the node does not meet the policy; the text names the register, expected and got",
        ),
        (
            UNREACHABLE,
            "the node could not be reached, or did not answer in time",
        ),
        (
            status::report::WAITS_FOR_KEY,
            "status: the node waits for the key of its disk",
        ),
        (
            status::report::FRESH,
            "status: the node belongs to no cluster",
        ),
        (
            status::report::OTHER_CLUSTER,
            "status: the node is a member of another cluster, or the ID of your cluster is unknown",
        ),
        (
            status::report::UNPROVEN,
            "status: only a join service answers, which proves nothing about its node",
        ),
        (130, "SIGINT has ended the command; 143 if it was SIGTERM"),
    ],
    examples: (
        "from a node's first boot to its recovery",
        &[
            "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt \
             --kubernetes-version v1.36.4",
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
        "Connects over attested TLS, checks that the node meets the policy, and sends it the master secret. Waits for a \
              node that still boots, and shows what the node does. The node's work does not depend on the connection: if the \
              connection is lost, run the same command with the same files again to watch the work and get its result.",
        "The policy or the command line must name the node's attestation key. The node's console shows the name; \
              `firstlight measure` writes it into the policy.",
        "With --kubernetes-version the node becomes the first control plane of a cluster. Without it the node's disk gets \
              its permanent key, and no cluster is made.",
    ],
    operand: Some(NODE_OPERAND),
    options: &[
        ENDPOINT_9000,
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        Opt::needed(
            "init-secret",
            Value::File,
            "the secret whose hash the node gets from the metadata, in a file that only you may read; - is standard input",
        ),
        Opt::value(
            "master-secret",
            Value::File,
            "the master secret; a new one is written if the file does not exist, and it is never overwritten; without it \
             nobody can recover the cluster",
        )
        .or(MASTER_SECRET_FILE),
        Opt::value(
            "kms",
            Value::Text("URI"),
            "write a new master secret only as the key of this external KMS wraps it (docs/kms.md), and keep it so in the cluster; \
             quote it in a shell",
        ),
        CREATE_KEY,
        KMS_ACCESS,
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        Opt::value("state", Value::File, "the file for the measurement salt, the cluster ID, and the node's attestation key")
            .or(STATE_FILE),
        Opt::value("kubeconfig", Value::File, "the file for the administrator's kubeconfig; must not exist")
            .or(KUBECONFIG_FILE),
        Opt::flag(
            "merge-kubeconfig",
            "also add the kubeconfig to the file that kubectl reads ($KUBECONFIG, else ~/.kube/config)",
        ),
        Opt::value("log", Value::File, "the file for the node's log; it is written if the node fails")
            .or("firstlight-cluster.log"),
        Opt::value("cluster-name", Value::Text("NAME"), "the cluster's name; by default the node chooses it"),
        Opt::value("kubernetes-version", Value::Text("VERSION"), "the cluster's version of Kubernetes, v1.31.0 or later"),
        Opt::value(
            "components",
            Value::File,
            "the list of programs that the node installs first, as `firstlight components` makes it; without it, init makes it in \
             the same way",
        ),
        Opt::value("service-cidr", Value::Text("NETWORK"), "the services' addresses; by default 10.96.0.0/12"),
        Opt::value("pod-cidr", Value::Text("NETWORK"), "the pods' addresses; by default the network plugin chooses them"),
        Opt::value(
            "apiserver-san",
            Value::Text("NAME"),
            "a further name or address of the API server; may be repeated",
        ),
        IMAGE_OF_INIT,
        ADDONS,
        CLOUD_PROVIDER,
        METADATA,
        SKIP_WAIT,
        Opt::flag("skip-addons", "do not install kubeadm's CoreDNS and kube-proxy, if the network plugin has its own"),
        Opt::flag("verbose", "show each line of the node's progress, not only its phases").short('v'),
        Opt::flag("dry-run", "check the files and the node, and say what would be done; send and write nothing"),
        OUTPUT,
        TIMEOUT.or("30m"),
    ],
    examples: &[
        "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret init-secret.txt \
         --kubernetes-version v1.36.4",
        "firstlight init --endpoint 10.42.1.100 --policy policy.json --init-secret secret.txt --kms 'kms://aws-kms?keyName=ARN'",
        "pass show cluster/init | firstlight init --endpoint [fd00::1]:9000 --policy policy.json --init-secret -",
    ],
    run: |given| init::run(&super::init_options(given)?),
};

/// The list of add-ons.
const ADDONS: Opt = Opt::value(
    "addons",
    Value::File,
    "a list (YAML) of charts and manifests to install, such as the network plugin; needs Helm (docs/addons.md)",
);
const APPLY: Command = Command {
    name: "apply",
    summary: "install or upgrade the services of the control planes in a cluster",
    about: &[
        "Installs the join service and the key service, with the master secret and the attestation policy. The objects are those of \
         the Helm chart in charts/firstlight. Run it again to change the image or the policy: settings that no option names keep \
         their values in the cluster, as Helm or an earlier run has set them, and the command lists them. It first saves the present \
         manifests into a folder named after the date. If the new ones are refused, or the services are not ready in time, it \
         restores the previous state.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "policy",
            Value::File,
            "the attestation policy that nodes must meet (JSON)",
        ),
        VARIANT,
        Opt::value(
            "image",
            Value::Text("IMAGE"),
            "a container image with /join-service and /key-service",
        ),
        Opt::value(
            "skip-phases",
            Value::Text("PHASE,.."),
            "do not change these: policy, services; without services no image is needed",
        ),
        ADDONS,
        Opt::value(
            "require",
            Value::OneOf("FORM", &super::REQUIRE),
            "strong: refuse nodes of the old form of attested TLS, which all nodes of Constellation use; the policy's own field \
             `\"require\": \"strong\"` does the same; any: admit them, unless the policy has that field; by default as before",
        ),
        KUBECONFIG,
        MASTER_SECRET,
        SHARE_FILE,
        Opt::value(
            "kms",
            Value::Text("URI"),
            "keep the master secret in the cluster only as the key of this external KMS wraps it (docs/kms.md), or plain: \
             kms://cluster-kms; the form before is deleted when all key services run with the new one; by default the form \
             stays as it is",
        ),
        CREATE_KEY,
        KMS_ACCESS,
        Opt::value(
            "state",
            Value::File,
            "the state file, which has the measurement salt",
        )
        .or(STATE_FILE),
        Opt::value(
            "node-port",
            Value::Text("PORT"),
            "the join service's port on every control plane; by default as before, and 30090 in a new cluster",
        ),
        CLOUD_PROVIDER_OF_APPLY,
        METADATA,
        Opt::value(
            "migrate-until",
            Value::Text("DATE"),
            "the last day, as 2027-01-31, on which the join service opens disks without a record, such as those of \
             Constellation, or never; by default as before, and never in a new cluster",
        ),
        Opt::value(
            "backups",
            Value::File,
            "the folder for the folders with saved manifests",
        )
        .or("."),
        SKIP_WAIT,
        Opt::value(
            "timeout",
            Value::Text("TIME"),
            "the limit until the services are ready, as 90s, 10m or 1h",
        )
        .or("10m"),
        Opt::flag(
            "dry-run",
            "ask the API server and the KMS whether they would accept all of it, and change nothing",
        ),
        Opt::flag(
            "print",
            "only print the manifests (JSON, with the master secret), without a cluster",
        ),
        OUTPUT,
    ],
    examples: &[
        "firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0",
        "firstlight apply --policy policy.json --image example.com/firstlight:0.1.0 --kms 'kms://cluster-kms' --dry-run",
        "firstlight apply --policy policy.json --image registry.example.com/firstlight:0.1.0 --skip-wait",
        "firstlight apply --policy policy-upgrade.json --skip-phases services",
    ],
    run: |given| apply::run(&super::apply_options(given)?),
};

const STATUS: Command = Command {
    name: "status",
    summary: "show the state of a node, or of all nodes of the cluster",
    about: &[
        "Asks the three ports on which a node can have a server, all at once: the recovery server of a node that waits in its \
         initramfs (9999), the InitServer of a node that waits for its init, or the server of a member (9000), and the join \
         service of a control plane (30090). With a port, it asks only that one. For each server it shows whether the server \
         answers, whether the node meets the policy, to which cluster it belongs (by PCR 15), or what it waits for.",
        "The exit code is 0 for a member of the cluster whose ID is given or in the state file, 3 if a register does not meet \
         the policy, 4 if no server answers, 5 for a node that waits for the key of its disk, 6 for a fresh node that belongs \
         to no cluster, 7 for a member of another cluster or if the ID is unknown, and 8 if only a join service answers, \
         which proves nothing about its node.",
        "Without HOST it asks all nodes that the API server of the cluster lists, each at its internal address, and prints a table: \
         what Kubernetes knows of the node, and the state that the node proves. Below the table it explains each node that is not a \
         member. The exit code is 0 if all nodes are members, and otherwise that of the worst node: 3, 7, 8, 6, 5, 4, in this order.",
    ],
    operand: Some(Operand {
        value: Value::Text("HOST[:PORT]"),
        is_needed: false,
        help: "the node, or one of its servers; without it, all nodes of the cluster",
    }),
    options: &[
        ENDPOINT,
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        Opt::flag(
            "timeline",
            "also draw where the time of the node's last boot went, as `firstlight timeline` does",
        ),
        SVG,
        KUBECONFIG,
        OUTPUT,
        TIMEOUT.or("30s"),
    ],
    examples: &[
        "firstlight status --policy policy.json",
        "firstlight status 10.42.1.100 --policy policy.json",
        "firstlight status [fd00::1]:9999 --policy policy.json --timeout 5s",
        "firstlight status 10.42.1.100 --policy policy.json --timeline --svg boot.svg",
    ],
    run: |given| status::run(&super::status_options(given)?),
};

const VERIFY: Command = Command {
    name: "verify",
    summary: "verify what a node or a join service proves",
    about: &[
        "Connects over attested TLS, in the strong form if the peer knows it, and checks the policy and the cluster's ID \
         (PCR 15). It prints what was proven: the form, the role, the stage of the boot, the image, the cluster, the attestation \
         key, and why the policy accepts the key; what the hardware or the cloud signed about the platform; then each register. \
         A join service (port 30090) proves itself only in the strong form.",
        "With --save the evidence is kept, also that of a machine that is refused: `firstlight verify --evidence` verifies it again, \
         by the same policy or another one, and `firstlight explain` shows the events behind its registers. A file does not prove \
         when it was written, so keep it as you keep a log.",
        "The exit code is 0 if the machine proves all of it, 3 if it does not meet the policy, and 4 if it cannot be reached. With \
         -o json, standard output has the result in each of these cases.",
    ],
    operand: Some(Operand {
        value: Value::Text("HOST[:PORT]"),
        is_needed: false,
        help: "the server; the default port is 9000, and with --plain 30081",
    }),
    options: &[
        ENDPOINT,
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        Opt::value(
            "evidence",
            Value::File,
            "verify evidence that --save wrote, instead of a server's",
        ),
        Opt::flag(
            "plain",
            "ask a verification service (`/verify.API/GetAttestation`), as Constellation has, without TLS",
        ),
        Opt::value(
            "save",
            Value::File,
            "write the evidence to this file, whether it is accepted or refused",
        ),
        ATTESTATION_KEY,
        CLUSTER_STATE,
        CLUSTER_ID,
        Opt::flag(
            "fresh",
            "the machine must belong to no cluster, as before its init, or in its initramfs",
        ),
        OUTPUT,
        TIMEOUT.or("30s"),
    ],
    examples: &[
        "firstlight verify 10.42.1.100 --policy policy.json",
        "firstlight verify 10.42.1.100:30090 --policy policy.json -o json",
        "firstlight verify 10.42.1.100:9999 --policy policy.json --fresh --save evidence.json",
        "firstlight verify --evidence evidence.json --policy policy.json --fresh",
    ],
    run: |given| verify::run(&super::verify_options(given)?),
};

const EXPLAIN: Command = Command {
    name: "explain",
    summary: "explain the registers of a machine by its event log",
    about: &[
        "For each register it shows the value, and the events that made it: what firmware, boot loader, kernel and systemd measured, \
         in words. FILE is an event log (/sys/kernel/security/tpm0/binary_bios_measurements, the CCEL of a TDX guest, systemd's \
         /run/log/systemd/tpm2-measure.log), or evidence: an attestation document (JSON). Nothing proves the values in a file. A NODE \
         proves its values over attested TLS.",
        "With --against or --against-image it also shows the first event that differs, and with --policy which register has \
         another value than the policy demands.",
        "The exit code is 0 if all registers are explained and as expected, and 1 if not.",
    ],
    operand: Some(Operand {
        value: Value::Text("FILE|NODE"),
        is_needed: false,
        help: "an event log or evidence (- is standard input), or the address of a node: HOST[:PORT]",
    }),
    options: &[
        ENDPOINT,
        Opt::value(
            "against",
            Value::File,
            "the event log, or the evidence, of a good machine",
        ),
        Opt::value(
            "against-image",
            Value::File,
            "the image that the machine should have booted, as for `firstlight measure`: a raw disk or a unified kernel image",
        ),
        Opt::value(
            "uki",
            Value::Text("PATH"),
            "the unified kernel image that boots, on the disk of --against-image; needed if there are several",
        ),
        Opt::value(
            "profile",
            Value::Text("ID"),
            "the profile of the unified kernel image that boots: its ID, or its number from 0; without it the first",
        ),
        Opt::value(
            "policy",
            Value::File,
            "the attestation policy that the machine should meet (JSON)",
        ),
        Opt::value(
            "cluster-id",
            Value::Text("HEX"),
            "the ID of the cluster to which the machine should belong",
        ),
        Opt::value(
            "systemd-log",
            Value::File,
            "the log of systemd on the same machine, if FILE has only that of the firmware",
        ),
        Opt::value(
            "pcrs",
            Value::Text("LIST"),
            "only these registers, as 4,9,11",
        ),
        VARIANT,
        KEPT,
        OFFLINE,
        OUTPUT,
        Opt::value(
            "timeout",
            Value::Text("TIME"),
            "the limit until the node answers, as 90s, 10m or 1h",
        )
        .or("30s"),
    ],
    examples: &[
        "firstlight explain 10.42.1.100 --policy policy.json",
        "firstlight explain refused.json --against good.json --pcrs 4,9,11",
        "firstlight explain binary_bios_measurements --against-image image.raw",
        "ssh root@10.42.1.100 cat /sys/kernel/security/tpm0/binary_bios_measurements | firstlight explain - -o json",
    ],
    run: |given| explain::run(&super::explain_options(given)?),
};

const TIMELINE: Command = Command {
    name: "timeline",
    summary: "draw where the time of a boot went",
    about: &[
        "Draws the events of a boot as a chart: for each step, when it ended after the kernel's start, how long it took, a bar, \
              and the event that ended it. The events are those of FILE: a node's /run/firstlight/timeline, a log of its \
              console, or its journal. If the file has several boots, the last one is drawn.",
        "`firstlight status --timeline` asks a running node for the same record.",
    ],
    operand: Some(Operand {
        value: Value::File,
        is_needed: true,
        help: "the file with the events; - is standard input",
    }),
    options: &[SVG, OUTPUT],
    examples: &[
        "firstlight timeline console.log --svg boot.svg",
        "ssh root@10.42.1.100 cat /run/firstlight/timeline | firstlight timeline -",
        "ssh root@10.42.1.100 journalctl -b -o cat | firstlight timeline -",
    ],
    run: |given| timeline::run(&super::timeline_options(given)?),
};

const RECOVER: Command = Command {
    name: "recover",
    summary: "send the master secret to a node that waits for the key of its disk",
    about: &[
        "A node waits in its initramfs if its cluster cannot give it the key of its disk, because no other control plane \
              runs. This command connects to the node over attested TLS, checks that it meets the policy, and sends it the \
              master secret. It succeeds when the node has opened its disk. If several nodes share an address, each run \
              recovers one of them.",
        "The policy, the state file or the command line must name the node's attestation key. The state file has the keys of \
              nodes that were initialized or recovered with it. Every node shows its key on its console, and a running \
              cluster has it in its records.",
        "When a whole cluster was off, recover control planes until more than half of them run. Then the cluster is back, and \
              opens the disks of its other nodes by itself.",
    ],
    operand: Some(NODE_OPERAND),
    options: &[
        Opt::value(
            "endpoint",
            Value::Text("HOST[:PORT]"),
            "the node; the default port is 9999",
        ),
        POLICY,
        VARIANT,
        KEPT,
        OFFLINE,
        MASTER_SECRET,
        SHARE_FILE,
        ATTESTATION_KEY,
        TRUST_ANY_TPM,
        KNOWN_NODES,
        Opt::flag(
            "migrate",
            "also open a disk whose header does not name its cluster, such as a disk of Constellation; use it only for a \
             disk that you know to be this node's; needs the measurement salt of the state file",
        ),
        Opt::flag(
            "status",
            "only show what the node waits for: the disk, since when, what it tried",
        ),
        OUTPUT,
        TIMEOUT.or("10m"),
    ],
    examples: &[
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --status",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --master-secret /media/safe/mastersecret.json",
        "firstlight recover --endpoint 10.42.1.100 --policy policy.json --share alice.txt --share bob.txt --share -",
    ],
    run: |given| recover::run(&super::recover_options(given)?),
};

const SSH: Command = Command {
    name: "ssh",
    summary: "certify your SSH key for the nodes of a cluster",
    about: &[
        "The cluster's two SSH certificate authorities, for users and for hosts, are derived from the master secret. This \
              command certifies your key for root on every node, for a day, and writes a known-hosts line by which ssh \
              recognizes the nodes' certificates. It needs no connection to a node. The machines' network decides whether \
              port 22 can be reached.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "key",
            Value::File,
            "your public key, as ~/.ssh/id_ed25519.pub; any type that can be certified",
        ),
        MASTER_SECRET,
        SHARE_FILE,
        Opt::value(
            "certificate",
            Value::File,
            "the file for the certificate; must not exist",
        )
        .or("firstlight-ssh-cert.pub"),
        Opt::value(
            "known-hosts",
            Value::File,
            "the file that gets the line for the nodes, unless it has it",
        )
        .or("firstlight-known_hosts"),
        Opt::flag(
            "old-hosts",
            "also recognize nodes of Constellation, whose host certificates are from the authority for users",
        ),
        Opt::flag("overwrite", "replace an existing certificate"),
        OUTPUT,
    ],
    examples: &[
        "firstlight ssh --key ~/.ssh/id_ed25519.pub",
        "firstlight ssh --key ~/.ssh/id_ed25519.pub --certificate ~/.ssh/id_ed25519-cert.pub --overwrite",
    ],
    run: |given| ssh::run(&super::ssh_options(given)?),
};

const MEASURE: Command = Command {
    name: "measure",
    summary: "write the attestation policy that an image or a machine meets",
    about: &[
        "With IMAGE or --kernel, computes the SHA-256 registers that a TPM will have after a machine boots the image, from only the \
         image. IMAGE is a raw disk with an EFI system partition, or a unified kernel image (UKI). It prints a policy (JSON) with the \
         registers that have one value; for each of the others, it says which values it can have and when, or why its value cannot be \
         known, and what to do instead. --stage, --secure-boot and --units say how the machines boot. The policy accepts any TPM \
         until it names attestation keys. On standard error it lists the channels that the image leaves open to the machine's host, \
         each with the line that closes it.",
        "Without an image, run it on a node whose software you trust. It prints a policy that demands the present values of \
              the TPM's registers. It names the machine's attestation key, and accepts no other machine until it names more keys.",
        "The policy always demands that PCR 15 is zero, as in a node that belongs to no cluster yet.",
        "For an upgrade, --add-to prints a policy that also accepts this image. It accepts nodes of the old image and nodes of \
              the new one, but no node with a mixture of their registers. It also adds the machine's attestation key if the \
              policy names keys.",
    ],
    operand: Some(Operand {
        value: Value::Text("IMAGE"),
        is_needed: false,
        help: "a raw disk image or a unified kernel image; without it, this machine's TPM is read",
    }),
    options: &[
        Opt::value(
            "uki",
            Value::Text("PATH"),
            "the unified kernel image that boots, on the disk's EFI system partition, as EFI/Linux/a.efi; needed if there \
             are several",
        ),
        Opt::value(
            "profile",
            Value::Text("ID"),
            "the profile of the unified kernel image that boots: its ID, or its number from 0; without it the first; the policy \
             names it",
        ),
        Opt::value(
            "kernel",
            Value::File,
            "instead of IMAGE: a kernel or unified kernel image that QEMU gives to OVMF (-kernel)",
        ),
        Opt::value(
            "initrd",
            Value::File,
            "the initrd of --kernel (QEMU's -initrd)",
        ),
        Opt::value(
            "cmdline",
            Value::Text("TEXT"),
            "the command line of --kernel (QEMU's -append)",
        ),
        Opt::value(
            "memory",
            Value::Text("MIB"),
            "the memory of the machine in MiB, on which PCR 4 (TDX: RTMR 1) depends with --kernel, and MRTD of an endorsement for \
             Google's older hypervisors",
        ),
        Opt::flag(
            "kernel-as-is",
            "QEMU does not change the kernel: QEMU 10 or newer with an OVMF of edk2-stable202505 or newer",
        ),
        Opt::value(
            "stage",
            Value::OneOf("STAGE", &["initramfs", "booted"]),
            "write only the registers of this stage: in the initramfs or in the booted system; by default the policy has both",
        ),
        Opt::value(
            "secure-boot",
            Value::OneOf("STATE", &["on", "off"]),
            "whether the machines have Secure Boot; by default both must agree",
        ),
        Opt::value(
            "units",
            Value::OneOf("UNITS", &["all", "phases", "booted", "none"]),
            "which of systemd's units that measure run: all; in the initramfs only systemd-pcrphase (dracut); only those of \
             the booted system; none; by default all possibilities must agree",
        ),
        Opt::flag(
            "explain",
            "print all values of each register with the events that give them, and the channels that the image leaves open to the \
             machine's host, but no policy",
        ),
        OUTPUT,
        Opt::flag(
            "accept-incomplete",
            "write the policy although PCR 4 (TDX: RTMR 1) or PCR 11 has no single value: machines that boot something else may \
             meet it",
        ),
        Opt::flag(
            "accept-efi-variables",
            "write the policy although the host can give systemd commands by EFI variables: without Secure Boot, and without \
             efi=noruntime in the image",
        ),
        Opt::value(
            "tpm",
            Value::Text("LOCATION"),
            "device:PATH, swtpm:host=ADDRESS,port=PORT or tdx:FOLDER; by default /dev/tpmrm0, else /dev/tpm0",
        ),
        Opt::value(
            "tdx-firmware",
            Value::File,
            "the firmware (OVMF) of TDX machines without a TPM: the policy has its measurement (MRTD), and RTMR 1 and 2 of the image; \
             without an image, only MRTD",
        ),
        Opt::value(
            "snp-firmware",
            Value::File,
            "the firmware (OVMF) of SEV-SNP machines: the policy also requires its launch digest; without an image, only that",
        ),
        Opt::value(
            "gce-endorsement",
            Value::File,
            "Google's launch endorsement (binarypb) of the firmware of its machines: the policy also requires its measurements, \
             MEASUREMENT of SEV-SNP or MRTD of TDX; without an image, only these",
        ),
        Opt::value(
            "gce-root",
            Value::File,
            "the root that certifies the signer of endorsements: GCE-cc-tcb-root_1.crt, which Google publishes",
        ),
        Opt::value(
            "gce-firmware",
            Value::File,
            "a firmware, which must be the endorsed one",
        ),
        Opt::value(
            "vcpus",
            Value::Text("NUMBERS"),
            "the number of processors of SEV-SNP machines; several, as 2,4,8, give a launch digest each; from an endorsement all are \
             taken by default",
        ),
        Opt::value(
            "vcpu-type",
            Value::Text("MODEL"),
            "QEMU's model of the processors of SEV-SNP machines, as EPYC-Milan or EPYC-v4",
        ),
        Opt::value(
            "hypervisor",
            Value::OneOf("NAME", &["kvm", "ec2", "gce"]),
            "the hypervisor of SEV-SNP machines: QEMU with KVM, that of Amazon EC2, or that of Google",
        )
        .or("kvm"),
        Opt::value(
            "guest-features",
            Value::Text("BITS"),
            "SEV_FEATURES of the processors of SEV-SNP machines; bit 0 SEV-SNP, 5 debug swap",
        )
        .or("0x1"),
        VARIANT,
        Opt::value(
            "pcrs",
            Value::Text("LIST"),
            "the registers to demand; by default those that say what runs: 2,3,4,8,9,11,12,13,15; of TDX machines 0,2,3 \
             (MRTD, RTMR 1 and 2)",
        ),
        Opt::value(
            "add-to",
            Value::File,
            "a policy, which is printed with this image added; its registers are the default of --pcrs",
        ),
        Opt::value(
            "name",
            Value::Text("NAME"),
            "the image's name in messages; by default the name of the image's file; needed if --add-to adds a machine's image",
        ),
        Opt::flag(
            "trust-any-tpm",
            "name no attestation key: the policy accepts unknown machines, but also a program that has no TPM and imitates \
             one",
        ),
    ],
    examples: &[
        "firstlight measure image.raw --secure-boot off --stage initramfs --units all > policy.json",
        "firstlight measure image.raw --explain",
        "firstlight measure --kernel vmlinuz --initrd initrd.img --cmdline 'console=ttyS0' --memory 2048 > policy.json",
        "firstlight measure > policy.json",
        "firstlight measure --tpm swtpm:host=127.0.0.1,port=2321 --pcrs 4,9,15",
        "firstlight measure --add-to policy.json --name 'image 1.3' > policy-upgrade.json",
        "firstlight measure image.raw --snp-firmware OVMF.fd --hypervisor ec2 --vcpus 2,4 > policy.json",
        "firstlight measure --gce-endorsement google.binarypb --gce-root GCE-cc-tcb-root_1.crt --vcpus 4 > policy.json",
    ],
    run: |given| measure::run(&super::measure_options(given)?),
};

const POLICY_FILE: Command = Command {
    name: "policy",
    summary: "check, show, compare or change the file with an attestation policy",
    about: &[
        "`check FILE` names each error, such as an unknown word, and what the policy does not pin: any TPM, any firmware, another \
         register than those that are named. The exit code is 0 without an error, and 1 with one. It is also an error if a register \
         is zero that every firmware extends, or if the policy accepts any boot loader and kernel.",
        "`show FILE` prints what the policy requires: variant, images with their registers, attestation keys, roots, and each \
         further requirement in words. `diff FILE FILE` prints what two policies require differently: `-` the first one, `+` the \
         second one. The exit code is 0 if they require the same, and 1 if not.",
        "`add-key FILE KEY..` and `remove-key FILE KEY..` change which attestation keys the policy accepts. KEY is the name of a key \
         as the console of its machine shows it; `-` reads the names from standard input. The file keeps its mode, and is replaced \
         as a whole. The last key is removed only with --trust-any-tpm, unless the platform endorses keys.",
    ],
    operand: Some(Operand {
        value: Value::Action(
            "check|show|diff|add-key|remove-key FILE..",
            &policy::ACTIONS,
        ),
        is_needed: true,
        help: "what to do with the policy in FILE; - is standard input for check, show and diff",
    }),
    options: &[
        Opt::flag(
            "trust-any-tpm",
            "remove-key: also remove the last key, after which a program that has no TPM and imitates one is accepted",
        ),
        VARIANT,
        OUTPUT,
    ],
    examples: &[
        "firstlight policy check policy.json",
        "firstlight policy show policy.json",
        "firstlight policy diff policy.json policy-upgrade.json",
        "firstlight policy add-key policy.json 000b1f0c...",
        "kubectl -n kube-system get configmap join-config -o jsonpath={.data.attestationConfig} | firstlight policy show -",
    ],
    run: |given| policy::run(&super::policy_options(given)?),
};

const COMPLETIONS: Command = Command {
    name: "completions",
    summary: "print the completions of these commands for a shell",
    about: &["The running shell can read the output at once, or from a file when it starts."],
    operand: Some(Operand {
        value: Value::OneOf("SHELL", completions::SHELLS),
        is_needed: true,
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

const COLLATERAL: Command = Command {
    name: "collateral",
    summary: "fetch the collateral of a quote, or the certificates of a report",
    about: &[
        "Prints the certificates that prove who signed the quote of a TDX machine or the report of an SEV-SNP machine, for machines \
         and verifiers that can reach neither Intel nor AMD. For a quote, it is Intel's collateral (JSON), which a machine sends if \
         it has it as /etc/firstlight/tdx-collateral.json; it is valid for up to 30 days. For a report, it is the certificate of the \
         chip, that of AMD's authority, and AMD's list of revoked authorities (PEM).",
        "This command verifies nothing: the verifier of a machine verifies its quote or report, and this output.",
    ],
    operand: Some(Operand {
        value: Value::File,
        is_needed: true,
        help: "a quote, a report, or evidence that `firstlight verify --save` wrote",
    }),
    options: &[
        Opt::value(
            "product",
            Value::OneOf("PRODUCT", &super::PRODUCTS),
            "the line of AMD's processors, for a report of version 2, which does not name it",
        ),
        KEPT,
        OFFLINE,
        Opt::value(
            "kds",
            Value::Text("URL"),
            "AMD's key distribution service, or a mirror of it",
        )
        .or(collateral::AMD),
        Opt::value(
            "pcs",
            Value::Text("URL"),
            "Intel's provisioning certification service, or a caching service (PCCS)",
        )
        .or(collateral::INTEL),
        Opt::value(
            "tcb-update",
            Value::OneOf("EVALUATION", &["early", "standard"]),
            "Intel's newest evaluation, or the one that gives operators months to update",
        )
        .or("early"),
        Opt::value(
            "collateral-ca",
            Value::File,
            "the authorities of these servers' own certificates (PEM); without it, those of this machine",
        ),
    ],
    examples: &[
        "firstlight collateral quote.bin > tdx-collateral.json",
        "firstlight collateral report.bin --product Milan > chip.pem",
        "firstlight collateral evidence.json --pcs https://pccs.example.com:8081 --collateral-ca pccs.pem",
    ],
    run: |given| super::collateral::run(&super::collateral_options(given)?),
};

const COMPONENTS: Command = Command {
    name: "components",
    summary: "list the programs of a version of Kubernetes, with their hashes, for the nodes",
    about: &[
        "Prints the list that `firstlight init --components` takes (JSON). The hashes of kubelet, kubeadm and kubectl, and the digests \
         of the control plane's images, are those that Kubernetes publishes now. Read the list, and keep it: nodes install nothing \
         with another hash.",
        "With --check it checks a list without a network, as a node will: each entry has a hash and a permitted place. With --files it \
         also compares downloaded files with their hashes.",
    ],
    operand: Some(Operand {
        value: Value::Text("VERSION"),
        is_needed: false,
        help: "the version of Kubernetes, as v1.34.4",
    }),
    options: &[
        Opt::value(
            "etcd",
            Value::Text("TAG"),
            "the tag of etcd's image, as 3.6.4-0, whose digest is pinned then; `kubeadm config images list` names it",
        ),
        Opt::value(
            "downloads",
            Value::Text("URL"),
            "the server of Kubernetes' programs, or a mirror of it, from which the nodes download them too",
        )
        .or(components::DOWNLOADS),
        Opt::value(
            "registry",
            Value::Text("URL"),
            "the registry of Kubernetes' images, which is asked for their digests",
        )
        .or(components::REGISTRY),
        Opt::value(
            "ca",
            Value::File,
            "the authorities of these servers' certificates (PEM); without it, those of this machine",
        ),
        Opt::value("check", Value::File, "check this list, and make none"),
        Opt::value(
            "files",
            Value::File,
            "with --check: a folder with downloaded files of the list",
        ),
        TIMEOUT.or("2m"),
    ],
    examples: &[
        "firstlight components v1.34.4 --etcd 3.6.4-0 > components.json",
        "firstlight components --check components.json --files ./downloads",
    ],
    run: |given| components::run(&super::components_options(given)?),
};

const UPGRADE: Command = Command {
    name: "upgrade",
    summary: "bring the components of a newer version of Kubernetes into a cluster",
    about: &[
        "Puts the list of components into the cluster, for nodes that join later, and lists the nodes that have another version. It \
         changes no node: `bootstrapper upgrade`, as root on each, does, with the same list. Run the command again to see which \
         nodes are left. docs/day-two/upgrade.md has the steps.",
        "It refuses what kubeadm does not upgrade: a cluster of a later version, a skipped minor version, and kubelets that are \
         older by more than three. New nodes join with the present version until kubeadm has upgraded the first control plane.",
    ],
    operand: Some(Operand {
        value: Value::Text("VERSION"),
        is_needed: true,
        help: "the version of Kubernetes, as v1.34.5",
    }),
    options: &[
        Opt::needed(
            "components",
            Value::File,
            "the list of programs of this version, as `firstlight components` makes it",
        ),
        KUBECONFIG,
        Opt::flag("dry-run", "check all of it, and change nothing"),
        OUTPUT,
        TIMEOUT.or("2m"),
    ],
    examples: &[
        "firstlight upgrade v1.34.5 --components components.json --dry-run",
        "firstlight upgrade v1.34.5 --components components.json",
    ],
    run: |given| upgrade::run(&super::upgrade_options(given)?),
};

const METADATA_SERVICE: Command = Command {
    name: "metadata",
    summary: "serve a list of machines as their metadata service",
    about: &[
        "For machines without a cloud, as in a rack or on a host with QEMU: each machine asks this server for its name and role, and \
         the server recognizes it by its address. The nodes' settings are `cloud-provider=qemu` and `metadata=http://ADDRESS:PORT`. \
         docs/metadata.md describes the list and the requests. Without a server, the same list can be a part of the image \
         (`cloud-provider=static`).",
        "The list is read again for each request. If it is not valid, the last valid one stays in use.",
    ],
    operand: Some(Operand {
        value: Value::OneOf("serve", &["serve"]),
        is_needed: true,
        help: "the only action",
    }),
    options: &[
        Opt::needed("machines", Value::File, "the list of machines (JSON)"),
        Opt::value(
            "listen",
            Value::Text("ADDRESS:PORT"),
            "the address of the server, in the network of the machines; *:PORT: all of this machine, of IPv6 and IPv4",
        )
        .or("*:8080"),
    ],
    examples: &["firstlight metadata serve --machines machines.json --listen 10.42.0.1:8080"],
    run: |given| metadata::run(&super::metadata_options(given)?),
};

const HASH_SECRET: Command = Command {
    name: "hash-secret",
    summary: "print the hash of an init secret, for the metadata of machines",
    about: &[
        "The metadata has the hash, and the operator keeps the secret: `firstlight init` sends it to the node. The hash is bcrypt's \
         and differs each time.",
    ],
    operand: Some(Operand {
        value: Value::File,
        is_needed: true,
        help: "the file with the secret, which only you may read; - is standard input",
    }),
    options: &[OUTPUT],
    examples: &[
        "openssl rand -base64 24 > init-secret.txt && chmod 600 init-secret.txt && firstlight hash-secret init-secret.txt",
        "pass show cluster/init | firstlight hash-secret -",
    ],
    run: |given| hash_secret::run(given.operand()?.as_ref(), Output::of(given)?),
};

const SHARE: Command = Command {
    name: "share",
    summary: "divide the master secret among several people",
    about: &[
        "Writes a small text file for each person. As many of them as --threshold restore the master secret together, and fewer \
              learn nothing about it (Shamir's scheme, as HashiCorp Vault has it). A share can be copied by hand: its code has digits \
              and letters that are hard to confuse, and a check.",
        "The commands that read the master secret take shares in its place: --share FILE for each, and --share - to type them. Then a \
         single file is no longer enough. Shares of different runs do not fit together, and those of earlier runs stay valid.",
    ],
    operand: None,
    options: &[
        Opt::needed(
            "threshold",
            Value::Text("NUMBER"),
            "how many shares restore the secret, at least 2",
        ),
        Opt::needed(
            "shares",
            Value::Text("NUMBER"),
            "how many shares are made, at most 255",
        ),
        MASTER_SECRET,
        SHARE_FILE,
        Opt::value(
            "out",
            Value::File,
            "the folder for the files share-1-of-5.txt and so on, none of which may exist; it is made if it is missing",
        )
        .or("firstlight-shares"),
        Opt::flag("qr", "also print each share as a QR code"),
        OUTPUT,
    ],
    examples: &[
        "firstlight share --threshold 3 --shares 5 --out /media/safe/shares",
        "firstlight share --threshold 2 --shares 3 --share alice.txt --share bob.txt --share carol.txt --qr",
    ],
    run: |given| share::run(&super::share_options(given)?),
};

const WRAP: Command = Command {
    name: "wrap",
    summary: "put the master secret into the care of an external key management service",
    about: &[
        "The service encrypts a random key, which encrypts the master secret. Every command takes the file that this one writes as \
         --master-secret: the service then decrypts the key at each use, if the user who runs the command has the permission. The \
         file is useless without the service's key.",
        "The URI names the service and its key, without credentials; quote it in a shell. \
         kms://vault?address=https://HOST:PORT&keyName=NAME is a key of the engine transit of Vault or OpenBao, \
         kms://aws-kms?keyName=ARN a key of AWS KMS, kms://azure-kms?address=https://VAULT.vault.azure.net&keyName=NAME one of Azure \
         Key Vault, kms://gcp-kms?keyName=projects/.. one of Google Cloud KMS, and kms://kmip?address=HOST:PORT&keyId=IDENTIFIER one \
         of a KMIP server. docs/kms.md has the parameters, and the permissions that the services need.",
        "A file that is wrapped already can be wrapped for another service.",
    ],
    operand: None,
    options: &[
        Opt::needed("kms", Value::Text("URI"), "the service and its key"),
        Opt::flag(
            "create-key",
            "have the service make the key if it is missing",
        ),
        MASTER_SECRET,
        SHARE_FILE,
        Opt::value(
            "out",
            Value::File,
            "the file to write, or storage://.. for an object in a store of a cloud (docs/kms.md); must not exist",
        )
        .or(WRAPPED_SECRET_FILE),
        OUTPUT,
    ],
    examples: &[
        "firstlight wrap --kms 'kms://vault?address=https://vault:8200&keyName=firstlight'",
        "firstlight wrap --kms 'kms://aws-kms?keyName=ARN' --out 'storage://aws?bucket=own&region=eu-central-1'",
    ],
    run: |given| wrap::wrap(&super::wrap_options(given)?),
};

const UNWRAP: Command = Command {
    name: "unwrap",
    summary: "write the plain master secret of a wrapped one",
    about: &["The service that the file names must decrypt its key. It is not needed afterwards."],
    operand: None,
    options: &[
        Opt::value(
            "master-secret",
            Value::File,
            "the wrapped master secret, or storage://.. of an object in a store (docs/kms.md)",
        )
        .or(WRAPPED_SECRET_FILE),
        Opt::value("out", Value::File, "the file to write; must not exist").or(MASTER_SECRET_FILE),
        OUTPUT,
    ],
    examples: &["firstlight unwrap"],
    run: |given| {
        wrap::unwrap(
            given.path("master-secret").as_ref(),
            given.path("out").as_ref(),
            Output::of(given)?,
        )
    },
};

const ROOTS: Command = Command {
    name: "roots",
    summary: "list the certificates of vendors that the programs trust",
    about: &[
        "A root is trusted only for what it certifies. The field `endorsementRoots` of a policy takes the names of those that \
              certify endorsement keys of TPMs.",
    ],
    operand: None,
    options: &[OUTPUT],
    examples: &["firstlight roots -o json | jq -r '.[].certificates[].sha256'"],
    run: |given| roots::run(Output::of(given)?),
};

const MAN: Command = Command {
    name: "man",
    summary: "print the manual page",
    about: &["The output has the format mdoc(7)."],
    operand: None,
    options: &[],
    examples: &["firstlight man > firstlight.1 && man ./firstlight.1"],
    run: |_| man::run(&PROGRAM),
};

const VERSION_COMMAND: Command = Command {
    name: "version",
    summary: "print the version, and the commit that it was built from",
    about: &["`firstlight --version` and `-V` are the same."],
    operand: None,
    options: &[OUTPUT],
    examples: &["firstlight version -o json"],
    run: |given| version::run(Output::of(given)?),
};

const NODE_OPERAND: Operand = Operand {
    value: Value::Text("HOST[:PORT]"),
    is_needed: false,
    help: "the node, in place of --endpoint",
};
const ENDPOINT_9000: Opt = Opt::value(
    "endpoint",
    Value::Text("HOST[:PORT]"),
    "the node; the default port is 9000",
);
const ENDPOINT: Opt = Opt::value(
    "endpoint",
    Value::Text("HOST[:PORT]"),
    "the same as the operand, in the form of init and recover",
);
const ATTESTATION_KEY: Opt = Opt::value(
    "attestation-key",
    Value::Text("NAME"),
    "also accept the attestation key with this name, which the node's console shows: 000b and 64 hex digits; may be repeated; with a \
     policy that names no keys, no others are accepted",
);
const TRUST_ANY_TPM: Opt = Opt::flag("trust-any-tpm", ANY_TPM_MEANS);
/// The help text of `--trust-any-tpm`, which is also printed as a warning at each use.
pub const ANY_TPM_MEANS: &str = "accept any attestation key: whatever answers at that address gets the master secret, even \
                                 a program that has no TPM and imitates one";
const KNOWN_NODES: Opt = Opt::value(
    "state",
    Value::File,
    "the state file, which has the attestation keys of known nodes; may be missing",
)
.or(STATE_FILE);

const CLUSTER_STATE: Opt = Opt::value(
    "state",
    Value::File,
    "the state file, which has the cluster's ID and its nodes' attestation keys; may be missing",
)
.or(STATE_FILE);
const CLUSTER_ID: Opt = Opt::value(
    "cluster-id",
    Value::Text("HEX"),
    "the cluster's ID; replaces the one in the state file",
);

const MASTER_SECRET_FILE: &str = "firstlight-mastersecret.json";
const WRAPPED_SECRET_FILE: &str = "firstlight-mastersecret.wrapped.json";

const STATE_FILE: &str = "firstlight-state.json";
const KUBECONFIG_FILE: &str = "firstlight-admin.conf";
const KUBECONFIG: Opt = Opt::value(
    "kubeconfig",
    Value::File,
    "the administrator's kubeconfig; without it $KUBECONFIG if it is set, as for kubectl, or else the default",
)
.or(KUBECONFIG_FILE);

const IMAGE_OF_INIT: Opt = Opt::value(
    "image",
    Value::Text("IMAGE"),
    "a container image with /join-service and /key-service, which are installed in the new cluster; without it, run \
     `firstlight apply` later",
);
const VARIANT: Opt = Opt::value(
    "attestation-variant",
    Value::OneOf("VARIANT", &variant::NAMES),
    "how the nodes attest themselves",
)
.was("variant")
.or(variant::DEFAULT);
/// The names of the clouds, and `none`.
const CLOUDS: [&str; machines::NAMES.len() + 1] = {
    let mut names = ["none"; machines::NAMES.len() + 1];
    let mut index = 0;
    while index < machines::NAMES.len() {
        names[index] = machines::NAMES[index];
        index += 1;
    }
    names
};
const CLOUD_PROVIDER: Opt = Opt::value(
    "cloud-provider",
    Value::OneOf("CLOUD", &CLOUDS),
    "the cloud whose metadata service the join service asks for the machines and their roles; with none, it accepts machines \
     of any name, but no control planes",
)
.was("csp")
.or(machines::DEFAULT.name());
const CLOUD_PROVIDER_OF_APPLY: Opt = Opt::value(
    "cloud-provider",
    Value::OneOf("CLOUD", &CLOUDS),
    "the cloud whose metadata service the join service asks for the machines and their roles; with none, it accepts machines \
     of any name, but no control planes; without it the cluster's stays, and a new one is qemu",
)
.was("csp");
const METADATA: Opt = Opt::value(
    "metadata",
    Value::Text("URL"),
    "the address of the metadata service, as seen from the control planes: http://HOST[:PORT]; by default the cloud's usual \
     address; with --cloud-provider static, file:PATH is the list of machines",
);
const SKIP_WAIT: Opt = Opt::flag(
    "skip-wait",
    "return as soon as the API server has accepted the services; do not roll back if they never get ready",
);
const KEPT: Opt = Opt::value(
    "collateral",
    Value::File,
    "a folder that keeps fetched certificates of chips and collateral of platforms, or a file of collateral (.json)",
);
const OFFLINE: Opt = Opt::flag(
    "offline",
    "fetch no certificates or collateral: the machine must send them, or --collateral has them; ask no cloud about a machine",
);
const POLICY: Opt = Opt::needed(
    "policy",
    Value::File,
    "the attestation policy that the node must meet (JSON)",
);
const MASTER_SECRET: Opt = Opt::value(
    "master-secret",
    Value::File,
    "the cluster's master secret; - is standard input; storage://.. is a wrapped one in a store (docs/kms.md)",
)
.or(MASTER_SECRET_FILE);
const CREATE_KEY: Opt = Opt::flag("create-key", "with --kms: make the key if it is missing");
const KMS_ACCESS: Opt = Opt::value(
    "kms-access",
    Value::File,
    "with --kms: what the key service needs to reach it, JSON with ports, env, credentialsSecret and authoritiesConfigMap \
     as in the chart's keyService.kms; by default the port of the URI",
);
const SHARE_FILE: Opt = Opt::value(
    "share",
    Value::File,
    "in place of --master-secret: the file of a share that `firstlight share` made; may be repeated; with - the missing \
     shares are asked for on the terminal",
);
const SVG: Opt = Opt::value(
    "svg",
    Value::File,
    "also write the chart as an SVG picture to this file, which is replaced if it exists",
);
const TIMEOUT: Opt = Opt::value(
    "timeout",
    Value::Text("TIME"),
    "the limit for the whole command, as 90s, 10m or 1h",
);

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
            // a shell interprets ? and &
            assert!(
                command
                    .examples
                    .iter()
                    .all(|line| !line.contains(" kms://")),
                "{}",
                command.name
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
