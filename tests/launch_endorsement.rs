//! Compares our verification of Google's launch endorsements with Google's own program, which signs and verifies them
//! (`tests/launch_endorsements_go`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use image::Error;
use image::firmware::Firmware;
use image::launch_endorsement::{Golden, KNOWN_ROOT, LaunchEndorsement, SignerRoot};
use support::foreign::go_program;
use support::mutation::mutations;
use support::openssl::openssl;
use support::program::measure;
use tempfile::TempDir;
use verifier::Policy;

const DAY: u64 = 24 * 3600;
/// Google's certificates have signatures of this kind, so those of the tests have them too.
const PSS: &str = "-sha256 -sigopt rsa_padding_mode:pss -sigopt rsa_pss_saltlen:32";

fn google_program(folder: &Path, arguments: &str) -> Output {
    let program = go_program("launch_endorsements_go", env!("CARGO_TARGET_TMPDIR"));
    let mut command = Command::new(program);
    command.args(arguments.split(' ')).current_dir(folder);
    command.output().unwrap()
}

fn google(folder: &Path, arguments: &str) -> String {
    let output = google_program(folder, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// A firmware that Google's program has endorsed, with keys that it made.
struct Endorsed {
    folder: TempDir,
}

static ENDORSED: LazyLock<Endorsed> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("ca")).unwrap();
    google(at, "firmware ovmf.fd");
    google(at, &format!("bootstrap {KEYS}"));
    for (technologies, name) in [
        ("--add_snp", "snp"),
        ("--add_tdx", "tdx"),
        (TECHNOLOGIES, "both"),
    ] {
        let commit = "--commit 0102030405060708090a0b0c0d0e0f1011121314";
        google(
            at,
            &format!(
                "endorse {KEYS} --uefi ovmf.fd {technologies} --out_root . --out_dir {name} {commit}"
            ),
        );
    }
    Endorsed { folder }
});

/// The folder in which Google's program keeps its keys and certificates.
const KEYS: &str =
    "--key_dir . --bucket_root . --bucket ca --root_path root.pem --cert_dir=./ --quiet";
/// Machines with SEV-SNP, and with TDX on Google's hypervisor of before October 2024, too.
const TECHNOLOGIES: &str = "--add_snp --add_tdx --tdx_include_early_accept --tdx_machine_shapes c3-standard-4,c3-standard-8";

impl Endorsed {
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn file(&self, technology: &str) -> String {
        self.path(&format!("{technology}/endorsement.binarypb"))
    }

    fn root(&self) -> String {
        self.path("ca/root.pem")
    }

    /// The launch digests by the number of processors, and the MRTDs with the memory of their machines in GiB, as Google's program computes
    /// them.
    fn computed(&self) -> (BTreeMap<u32, String>, Vec<(u32, String)>) {
        let said = google(
            self.folder.path(),
            &format!("endorse {KEYS} --uefi ovmf.fd --measurement_only {TECHNOLOGIES}"),
        );
        let (mut digests, mut mrtds) = (BTreeMap::new(), vec![]);
        for line in said.lines() {
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                [count, digest] => drop(digests.insert(count.parse().unwrap(), digest.to_owned())),
                [ram, _, mrtd] => {
                    let ram = ram.strip_prefix("RAM:").unwrap().parse().unwrap();
                    mrtds.push((ram, mrtd.strip_prefix("MRTD:").unwrap().to_owned()));
                }
                _ => {}
            }
        }
        assert!(digests.len() > 10 && mrtds.len() == 5, "{said}");
        (digests, mrtds)
    }

    /// The message inside the file, which Google's program has signed.
    fn golden(&self) -> Vec<u8> {
        let file = fs::read(self.file("both")).unwrap();
        assert_eq!(file[0], 0x0a);
        let len = usize::from(file[1] & 0x7f) | usize::from(file[2]) << 7;
        file[3..3 + len].to_vec()
    }
}

/// The policy that `firstlight measure` prints, and its messages on standard error.
fn measured(args: &[&str]) -> (String, String) {
    let (code, said, errors) = measure(args);
    assert_eq!(code, 0, "{errors}");
    Policy::from_json(&said).unwrap();
    (said, errors)
}

/// The launch digests that a policy accepts.
fn accepted(policy: &str) -> Vec<String> {
    let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
    let digests = policy["snp"]["launchMeasurements"].as_array().unwrap();
    let text = |digest: &serde_json::Value| digest.as_str().unwrap().to_owned();
    digests.iter().map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The names of a policy's images, each with its MRTD and the numbers of all registers.
fn images(policy: &str) -> Vec<(String, String, Vec<u32>)> {
    let policy = Policy::from_json(policy).unwrap();
    let images = policy.images().iter().map(|image| {
        let values = image.measurements();
        let numbers = values.keys().copied().collect();
        (image.name().to_owned(), hex(&values[&0].expected), numbers)
    });
    images.collect()
}

#[test]
fn launch_digests_are_those_that_google_signed() {
    let google = &*ENDORSED;
    let (computed, _) = google.computed();
    let (file, root, firmware) = (google.file("snp"), google.root(), google.path("ovmf.fd"));
    let endorsement = ["--gce-endorsement", &file, "--gce-root", &root];
    let (policy, said) = measured(&endorsement);
    assert_eq!(
        accepted(&policy),
        computed.values().cloned().collect::<Vec<_>>()
    );
    for part in [
        "only the firmware",
        "by \"GCE-uefi-signer\"",
        "built of change 123, commit 0102030405060708090a0b0c0d0e0f1011121314",
        "SEV-SNP: SVN 0, guest policy 0x70000, numbers of processors 1,2,4,8,",
        // these keys are not Google's
        "the root is not GCE-cc-tcb-root_1",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }

    // only the requested values of the endorsed firmware
    let few = ["--vcpus", "4,2", "--gce-firmware", &firmware];
    let (policy, _) = measured(&[&endorsement[..], &few].concat());
    let expected = [computed[&4].clone(), computed[&2].clone()];
    assert_eq!(accepted(&policy), expected);
    let registers = Policy::from_json(&policy).unwrap().images()[0]
        .measurements()
        .clone();
    assert_eq!(registers.keys().collect::<Vec<_>>(), [&15]);

    // the digests are added to those of the policy; an existing digest is not repeated
    let path = google.path("policy of a TPM.json");
    let other = "ab".repeat(48);
    let with_other = policy.replace(&computed[&2], &other);
    fs::write(&path, &with_other).unwrap();
    let more = ["--vcpus", "2", "--add-to", &path];
    let (policy, said) = measured(&[&endorsement[..], &more].concat());
    let expected = [computed[&4].clone(), other.clone(), computed[&2].clone()];
    assert_eq!(accepted(&policy), expected);
    let note = format!("also accepts the launch digest {other}\n");
    assert!(
        said.contains(&note) && !said.contains(&computed[&4]),
        "{said}"
    );

    // with an image the registers of the TPM are there, too
    let kernel = support::boot_image::kernel();
    let image = [
        "--kernel",
        kernel.to_str().unwrap(),
        "--memory",
        "2048",
        "--cmdline",
        "quiet efi=noruntime",
    ];
    let all = [&endorsement[..], &image, &["--vcpus", "8"]].concat();
    let (policy, _) = measured(&all);
    assert_eq!(accepted(&policy), [computed[&8].clone()]);
    let policy = Policy::from_json(&policy).unwrap();
    assert!(policy.images()[0].measurements().contains_key(&9));
    let (code, said, errors) = measure(&[&all[..], &["--explain"]].concat());
    assert_eq!(code, 0, "{errors}");
    let expected = format!("MEASUREMENT with --vcpus 8\n  {}\n", computed[&8]);
    assert!(said.contains("PCR 9") && said.contains(&expected), "{said}");
}

#[test]
fn the_launch_digests_of_the_endorsed_firmware_are_the_endorsed_ones() {
    let google = &*ENDORSED;
    let (digests, mrtds) = google.computed();
    let firmware = google.path("ovmf.fd");
    let counts: Vec<_> = digests.keys().map(u32::to_string).collect();
    let counts = counts.join(",");
    let machines = ["--hypervisor", "gce", "--vcpus", &counts];
    let ours = measured(&[&["--snp-firmware", &firmware][..], &machines].concat()).0;
    assert_eq!(accepted(&ours), digests.into_values().collect::<Vec<_>>());
    // the newer hypervisor of Google adds and measures pages as Linux does
    let bytes = fs::read(firmware).unwrap();
    let ours = image::tdx::mrtd(&Firmware::parse(&bytes).unwrap()).unwrap();
    let any_memory = mrtds.into_iter().find(|(gib, _)| *gib == 0);
    assert_eq!(any_memory, Some((0, hex(&ours))));
}

#[test]
fn mrtds_are_those_that_google_signed() {
    let google = &*ENDORSED;
    let (_, computed) = google.computed();
    let mrtds = |gib: &[u32]| -> Vec<String> {
        let some = computed.iter().filter(|(of, _)| gib.contains(of));
        some.map(|(_, mrtd)| mrtd.clone()).collect()
    };
    let (file, root) = (google.file("both"), google.root());
    let endorsement = ["--gce-endorsement", &file, "--gce-root", &root];

    // a policy that has only these values
    let variant = ["--attestation-variant", "qemu-tdx"];
    let (policy, said) = measured(&[&endorsement[..], &variant].concat());
    let found = images(&policy);
    let values: Vec<_> = found.iter().map(|image| image.1.clone()).collect();
    assert_eq!(values, mrtds(&[0, 16, 32]));
    assert!(found.iter().all(|image| image.2 == [0, 4]), "{found:?}");
    assert!(said.contains("only the firmware (MRTD)"), "{said}");
    assert!(
        said.contains("TDX: SVN 0, any memory, 16 GiB, 32 GiB"),
        "{said}"
    );
    let one_size = ["--memory", "32768", "--name", "google"];
    let (policy, _) = measured(&[&endorsement[..], &one_size].concat());
    let values: Vec<_> = images(&policy).into_iter().map(|image| image.1).collect();
    assert_eq!(values, mrtds(&[0, 32]));
    assert!(images(&policy)[0].0 == "google", "{policy}");

    // the file for only TDX needs no option of the operator, and has one MRTD for machines of all sizes
    let alone = google.file("tdx");
    let alone = ["--gce-endorsement", &alone, "--gce-root", &root];
    let (policy, _) = measured(&alone);
    let expected = (String::new(), mrtds(&[0])[0].clone(), vec![0, 4]);
    assert_eq!(images(&policy), [expected]);

    // machines with a TPM: the policy lists the firmware
    let variant = ["--attestation-variant", "gcp-tdx"];
    let (policy, said) = measured(&[&endorsement[..], &variant].concat());
    assert!(said.contains("only the firmware"), "{said}");
    let listed = |policy: &str| {
        let policy = Policy::from_json(policy).unwrap();
        let all = policy.tdx().mr_td.iter().map(|mrtd| hex(&mrtd.0));
        all.collect::<Vec<_>>()
    };
    assert_eq!(listed(&policy), mrtds(&[0, 16, 32]));
    let path = google.path("policy of Google's TDX.json");
    let other = "ab".repeat(48);
    fs::write(&path, policy.replace(&mrtds(&[16])[0], &other)).unwrap();
    let more = ["--memory", "16384", "--add-to", &path];
    let (policy, said) = measured(&[&endorsement[..], &more].concat());
    let missing = &mrtds(&[16])[0];
    let mut expected = mrtds(&[0, 16, 32]);
    for mrtd in expected.iter_mut().filter(|mrtd| *mrtd == missing) {
        *mrtd = other.clone();
    }
    expected.push(missing.clone());
    assert_eq!(listed(&policy), expected);
    let note = format!("also accepts the MRTD {other}\n");
    assert!(said.contains(&note), "{said}");

    // the values of the booted files stay in the policy, whatever the firmware is
    let path = google.path("policy of TDX.json");
    let value = |byte: &str| format!("{{\"expected\":\"{}\"}}", byte.repeat(48));
    let read = format!(
        "{{\"measurements\":{{\"0\":{},\"2\":{},\"3\":{},\"4\":{}}},\"name\":\"one\"}}",
        value("aa"),
        value("bb"),
        value("cc"),
        value("00")
    );
    fs::write(&path, &read).unwrap();
    let more = ["--memory", "7168", "--add-to", &path];
    let (policy, said) = measured(&[&endorsement[..], &more].concat());
    let any_memory = &mrtds(&[0])[0];
    let registers = vec![0, 2, 3, 4];
    assert_eq!(
        images(&policy),
        [
            ("one".to_owned(), "aa".repeat(48), registers.clone()),
            (
                format!("one, MRTD {}", &any_memory[..8]),
                any_memory.clone(),
                registers
            ),
        ]
    );
    let note = format!("also accepts one with the MRTD {}\n", "aa".repeat(48));
    assert!(said.contains(&note), "{said}");
    // a machine whose values Google endorses adds nothing, and no message mentions it
    let endorsed = read.replace(&"aa".repeat(48), any_memory);
    fs::write(&path, &endorsed).unwrap();
    let (policy, said) = measured(&[&endorsement[..], &more].concat());
    let written = cli::trust::policy::text(&Policy::from_json(&endorsed).unwrap());
    assert_eq!(policy.trim(), written);
    assert!(!said.contains("also accepts"), "{said}");
}

#[test]
fn what_cannot_be_taken_from_an_endorsement_is_refused_by_name() {
    let google = &*ENDORSED;
    let root = google.root();
    let (snp, tdx, both) = (google.file("snp"), google.file("tdx"), google.file("both"));
    let with = |file| ["--gce-endorsement", file, "--gce-root", &root];
    let (of_snp, of_tdx, of_both) = (with(&snp), with(&tdx), with(&both));
    let of_tpm = google.path("a policy of a TPM.json");
    let digests = "{\"measurements\":{\"15\":\"".to_owned() + &"00".repeat(32) + "\"}}";
    fs::write(&of_tpm, digests).unwrap();
    let of_td = google.path("a policy of TDX.json");
    let registers = "{\"measurements\":{\"4\":\"".to_owned() + &"00".repeat(48) + "\"}}";
    fs::write(&of_td, registers).unwrap();
    let firmware = google.path("ovmf.fd");
    for (given, more, code, expected) in [
        (&of_snp[..2], &[][..], 2, "--gce-root <FILE>"),
        (&of_snp[2..], &[], 2, "--gce-endorsement <FILE>"),
        (&[], &["--gce-firmware", "f"], 2, "--gce-endorsement <FILE>"),
        (&of_snp, &["--tdx-firmware", "f"], 2, "cannot be used with"),
        (&of_snp, &["--snp-firmware", "f"], 2, "cannot be used with"),
        (
            &of_snp,
            &["--vcpu-type", "EPYC"],
            2,
            "--snp-firmware <FILE>",
        ),
        (&of_snp, &["--pcrs", "4"], 2, "only the firmware"),
        (&of_snp, &["--explain"], 2, "only the firmware"),
        (&of_snp, &["--vcpus", "0"], 2, "0 is not in 1..=4096"),
        (
            &of_both,
            &[],
            2,
            "--attestation-variant gcp-sev-snp, gcp-tdx or qemu-tdx",
        ),
        (
            &of_snp,
            &["--vcpus", "3"],
            1,
            "no machine with 3 processors, but with 1,2,4",
        ),
        (&of_tdx, &["--vcpus", "2"], 1, "nothing for SEV-SNP"),
        (&of_snp, &["--memory", "1024"], 1, "nothing for TDX"),
        (&of_tdx, &["--add-to", &of_tpm], 1, "nothing for SEV-SNP"),
        (&of_snp, &["--add-to", &of_td], 1, "nothing for TDX"),
        (
            &of_both,
            &["--add-to", &of_td, "--vcpus", "2"],
            2,
            "MRTD of TDX machines does not",
        ),
        (
            &of_both,
            &["--add-to", &of_tpm, "--memory", "9"],
            2,
            "SEV-SNP machines does not",
        ),
        (
            &of_snp,
            &["--gce-firmware", "/bin/sh"],
            1,
            "/bin/sh: it is not the endorsed firmware",
        ),
        (
            &with(&firmware),
            &[],
            1,
            "not a launch endorsement of Google",
        ),
        (
            &["--gce-endorsement", &snp, "--gce-root", &snp],
            &[],
            1,
            "expected one certificate",
        ),
        (
            &["--gce-endorsement", &snp, "--gce-root", "/none"],
            &[],
            1,
            "/none: No such file",
        ),
    ] {
        let (found, said, errors) = measure(&[given, more].concat());
        assert!(
            found == code && said.is_empty(),
            "{found}: {expected}: {said}{errors}"
        );
        assert!(errors.contains(expected), "expected {expected}: {errors}");
    }
}

/// An own hierarchy, as openssl makes it: roots, signers, and what they signed.
struct Hierarchy {
    folder: TempDir,
    golden: Vec<u8>,
}

/// A field of Protocol Buffers with bytes; of two with the same number the last one counts.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut len = bytes.len();
    while len > 0x7f {
        field.push(len as u8 | 0x80);
        len >>= 7;
    }
    field.push(len as u8);
    [&field, bytes].concat()
}

impl Hierarchy {
    fn new() -> Hierarchy {
        let hierarchy = Hierarchy {
            folder: tempfile::tempdir().unwrap(),
            golden: ENDORSED.golden(),
        };
        for root in ["root", "other"] {
            hierarchy.openssl(&format!(
                "req -x509 -newkey rsa:2048 -nodes -keyout {root}.key -out {root}.pem -days 3650 {PSS} -subj /CN=GCE-cc-tcb-root"
            ));
        }
        hierarchy.openssl("genrsa -out signer.key 2048");
        hierarchy.openssl("req -new -key signer.key -out request -subj /CN=GCE-uefi-signer");
        hierarchy
    }

    fn openssl(&self, arguments: &str) {
        openssl(self.folder.path(), arguments);
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.folder.path().join(name)).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The certificate (DER) of the signer with these extensions, below an authority, with the signature of `pss`.
    fn certificate(&self, authority: &str, extensions: &str, pss: &str) -> Vec<u8> {
        fs::write(self.path("extensions"), extensions).unwrap();
        self.openssl(&format!(
            "x509 -req -in request -CA {authority}.pem -CAkey {authority}.key -CAcreateserial -days 100 {pss} \
             -extfile extensions -outform DER -out signer.der"
        ));
        self.read("signer.der")
    }

    /// An endorsement that the signer has signed, with this certificate.
    fn endorsement(&self, certificate: &[u8], pss: &str) -> Vec<u8> {
        let golden = [&self.golden[..], &field(4, certificate)].concat();
        fs::write(self.path("golden"), &golden).unwrap();
        self.openssl(&format!(
            "dgst {pss} -sign signer.key -out signature golden"
        ));
        [field(1, &golden), field(2, &self.read("signature"))].concat()
    }

    fn verify(&self, file: &[u8], root: &str, now: SystemTime) -> Result<Golden, Error> {
        let root = SignerRoot::parse(&self.read(root)).unwrap();
        let endorsement = LaunchEndorsement::parse(file)?;
        endorsement.verify(&root, now).cloned()
    }

    /// Returns whether Google's program accepts it today.
    fn is_accepted_by_google(&self, file: &[u8], root: &str) -> bool {
        let folder = self.folder.path();
        fs::write(folder.join("endorsement"), file).unwrap();
        self.openssl(&format!("x509 -in {root} -outform DER -out root.der"));
        let firmware = ENDORSED.path("ovmf.fd");
        let output = google_program(folder, &format!("verify endorsement root.der {firmware}"));
        output.status.success()
    }
}

const SIGNER: &str = "keyUsage=critical,digitalSignature\nbasicConstraints=critical,CA:FALSE\n";

#[test]
fn each_fault_of_an_endorsement_is_refused_by_name_and_by_google() {
    let own = Hierarchy::new();
    // after all certificates of the test are made
    let now = SystemTime::now() + Duration::from_secs(3600);
    let certificate = own.certificate("root", SIGNER, PSS);
    let valid = own.endorsement(&certificate, PSS);
    let golden = own.verify(&valid, "root.pem", now).unwrap();
    assert!(own.is_accepted_by_google(&valid, "root.pem"));
    assert_eq!(golden.signer, "GCE-uefi-signer");
    assert_eq!(own.verify(&valid, "root.der", now).unwrap(), golden);

    let signer = |authority, extensions: &str, pss| {
        own.endorsement(&own.certificate(authority, extensions, pss), PSS)
    };
    let mut altered = valid.clone();
    *altered.last_mut().unwrap() ^= 1;
    let appended = [&own.golden[..], &field(4, &certificate), &field(3, b"")].concat();
    let resigned = [field(1, &appended), field(2, &own.read("signature"))].concat();
    let unsigned = field(1, &appended);
    // an authority between the root and the signer
    let authority = "keyUsage=critical,keyCertSign\nbasicConstraints=critical,CA:TRUE\n";
    fs::write(own.path("extensions"), authority).unwrap();
    own.openssl("genrsa -out between.key 2048");
    own.openssl("req -new -key between.key -out between.request -subj /CN=between");
    own.openssl(&format!(
        "x509 -req -in between.request -CA root.pem -CAkey root.key -CAcreateserial -days 100 {PSS} -extfile extensions -out between.pem"
    ));
    let wrong_signature = "the signature of the endorsement is wrong";
    let other_root = "the certificate of the endorsement's signer is not signed by the given root";
    for (file, root, expected) in [
        (altered, "root.pem", wrong_signature),
        (resigned, "root.pem", wrong_signature),
        (unsigned, "root.pem", wrong_signature),
        (
            own.endorsement(&certificate, "-sha256"),
            "root.pem",
            wrong_signature,
        ),
        (
            own.endorsement(&certificate, &PSS.replace("256", "384")),
            "root.pem",
            wrong_signature,
        ),
        (valid.clone(), "other.pem", other_root),
        (signer("other", SIGNER, PSS), "root.pem", other_root),
        (signer("between", SIGNER, PSS), "root.pem", other_root),
        (
            fs::read(ENDORSED.file("both")).unwrap(),
            "root.pem",
            other_root,
        ),
        (
            signer(
                "root",
                &format!("{SIGNER}extendedKeyUsage=clientAuth\n"),
                PSS,
            ),
            "root.pem",
            "extended key usage",
        ),
        (
            own.endorsement(b"", PSS),
            "root.pem",
            "signer cannot be read",
        ),
        (
            own.endorsement(&certificate[..99], PSS),
            "root.pem",
            "signer cannot be read",
        ),
    ] {
        let error = own.verify(&file, root, now).unwrap_err();
        assert!(
            matches!(&error, Error::Untrusted(why) if why.contains(expected)),
            "expected {expected}: {error}"
        );
        assert!(!own.is_accepted_by_google(&file, root), "{expected}");
    }
    // fields that Google's program does not check
    for (extensions, pss, expected) in [
        (
            &SIGNER.replace("digitalSignature", "keyEncipherment")[..],
            PSS,
            "is not for signatures",
        ),
        (
            "basicConstraints=critical,CA:FALSE\n",
            PSS,
            "is not for signatures",
        ),
        (authority, PSS, "is a CA certificate"),
        (
            SIGNER,
            "-sha256",
            "signer is refused: a certificate is signed with an algorithm that this program does not verify",
        ),
    ] {
        let error = own
            .verify(&signer("root", extensions, pss), "root.pem", now)
            .unwrap_err();
        assert!(
            matches!(&error, Error::Untrusted(why) if why.contains(expected)),
            "expected {expected}: {error}"
        );
    }

    // the signer's certificate ends after 100 days, the root after 3650
    let after = |days: u64| now + Duration::from_secs(days * DAY);
    for (time, expected) in [
        (UNIX_EPOCH, "the root is not valid yet"),
        (after(101), "signer has expired"),
        (after(3651), "the root has expired"),
    ] {
        let error = own.verify(&valid, "root.pem", time).unwrap_err();
        assert!(
            matches!(&error, Error::Untrusted(why) if why.contains(expected)),
            "expected {expected}: {error}"
        );
    }
    // a signer is no root
    let valid = own.endorsement(&own.certificate("root", SIGNER, PSS), PSS);
    own.openssl("x509 -inform DER -in signer.der -out signer.pem");
    let error = own.verify(&valid, "signer.pem", now).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the root is not a CA certificate"),
        "{error}"
    );
}

#[test]
fn an_altered_endorsement_says_what_was_signed_or_nothing() {
    let google = &*ENDORSED;
    let root = SignerRoot::parse(&fs::read(google.root()).unwrap()).unwrap();
    assert_ne!(root.fingerprint(), KNOWN_ROOT);
    let valid = fs::read(google.file("both")).unwrap();
    let now = SystemTime::now();
    let read = |bytes: &[u8]| LaunchEndorsement::parse(bytes)?.verify(&root, now).cloned();
    let right = read(&valid).unwrap();
    let mut accepted = 0;
    for bytes in mutations(&valid, 3000) {
        if let Ok(golden) = read(&bytes) {
            assert_eq!(golden, right);
            accepted += 1;
        }
    }
    // such as an unknown field after the signed one
    assert!(accepted < 300, "{accepted}");
    for len in 0..valid.len() {
        assert!(read(&valid[..len]).is_err(), "{len}");
    }
}
