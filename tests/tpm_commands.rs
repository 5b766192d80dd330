//! Compares our commands to a TPM with those of tpm2-tss, on two software TPMs with the same seeds. Each of our commands must have
//! the same bytes as the one that tpm2-tss sends for the same purpose, and both programs must read the same values from the
//! responses.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, mpsc};

use support::foreign::rust_program_with_libraries;
use support::swtpm::{Proxy, Swtpm, manufacture, message};
use tpm::{Bank, Credential, EndorsementKind, KeySource, Location, Tpm};

const NONCE: &[u8] = b"the verifier's own random number";
const EVENT: &[u8] = b"an event";
/// The NV index of the test, and its size: more than one command reads. The peer has the same.
const INDEX: u32 = 0x0180_0001;
const SIZE: usize = 700;
/// Command codes (TPM 2.0 part 2 §6.5.2).
const START_AUTH_SESSION: u32 = 0x176;
const POLICY_SECRET: u32 = 0x151;
const FLUSH_CONTEXT: u32 = 0x165;
const ACTIVATE_CREDENTIAL: u32 = 0x147;
const CREATE_PRIMARY: u32 = 0x131;
const PCR_EXTEND: u32 = 0x182;
const NV_DEFINE_SPACE: u32 = 0x12a;
const QUOTE: u32 = 0x158;
const SHUTDOWN: u32 = 0x145;
/// The second byte of the tag of a command with sessions.
const SESSIONS: u8 = 2;

/// The program of tests/tss_peer, built once. It links Debian's shared libraries.
static PEER: LazyLock<PathBuf> =
    LazyLock::new(|| rust_program_with_libraries("tss_peer", "tss-peer", &[]));

/// A machine's TPM, and the commands that a program sent to it.
struct Recorded {
    tpm: Swtpm,
    proxy: Proxy,
    commands: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Recorded {
    /// Starts a TPM with this state. Commands that it refuses are not recorded: tpm2-tss asks for handles before it uses them.
    fn start(state: &Path) -> Recorded {
        let tpm = Swtpm::start_in(state);
        let commands = Arc::new(Mutex::new(vec![]));
        let seen = commands.clone();
        let proxy = Proxy::between(&tpm, move |mut client, mut server| {
            while let Some(command) = message(&mut client) {
                server.write_all(&command).unwrap();
                let response = message(&mut server).unwrap();
                if response[6..10] == [0; 4] {
                    seen.lock().unwrap().push(command);
                }
                client.write_all(&response).unwrap();
            }
        });
        Recorded {
            tpm,
            proxy,
            commands,
        }
    }

    fn location(&self) -> Location {
        self.proxy.location().parse().unwrap()
    }

    /// Runs the peer on this TPM; returns its lines: a word, and bytes.
    fn peer(&self, arguments: &[&str]) -> Vec<(String, Vec<u8>)> {
        let output = Command::new(&*PEER)
            .arg(self.proxy.location())
            .args(arguments)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(|line| {
                let (word, hex) = line.split_once(' ').unwrap();
                (word.to_owned(), unhex(hex))
            })
            .collect()
    }

    /// Returns the sent commands without their random parts: nonces and the handles of sessions.
    fn sent(&self) -> BTreeSet<String> {
        let commands = self.commands.lock().unwrap();
        commands.iter().map(|command| comparable(command)).collect()
    }
}

fn code(command: &[u8]) -> u32 {
    u32::from_be_bytes(command[6..10].try_into().unwrap())
}

/// Returns the code, the handles and the parameters of a command without their random parts: nonces, and the handles of sessions.
/// The authorization is left out: our program sends passwords, while tpm2-tss uses sessions for some commands, and a TPM accepts
/// both.
fn comparable(command: &[u8]) -> String {
    let handles = match code(command) {
        START_AUTH_SESSION => {
            let nonce = usize::from(u16::from_be_bytes([command[18], command[19]]));
            // tpmKey, bind, the length of the nonce; no salt, the kind of session. We name no algorithm for the encryption of parameters
            let parts = [&command[6..20], &command[20 + nonce..23 + nonce]];
            return hex(&parts.concat());
        }
        FLUSH_CONTEXT => return hex(&[&command[6..11]].concat()),
        PCR_EXTEND | CREATE_PRIMARY | QUOTE | NV_DEFINE_SPACE => 1,
        _ => 2,
    };
    if command[1] != SESSIONS {
        return hex(&command[6..]);
    }
    let (handles, rest) = command[10..].split_at(4 * handles);
    let mut handles = handles.to_vec();
    if code(command) == POLICY_SECRET || code(command) == ACTIVATE_CREDENTIAL {
        // a session, or a transient key
        handles[5..].fill(0);
    }
    let area = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
    let mut parameters = rest[4 + area..].to_vec();
    if code(command) == CREATE_PRIMARY {
        // tpm2-tss encrypts inSensitive for an endorsement key: four zeros
        parameters[2..6].fill(0);
    }
    if code(command) == PCR_EXTEND {
        parameters = in_order(&parameters);
    }
    hex(&[&command[6..10], &handles, &parameters].concat())
}

/// Sorts TPML_DIGEST_VALUES: tpm2-tss has them in any order.
fn in_order(list: &[u8]) -> Vec<u8> {
    let (mut digests, mut rest) = (vec![], &list[4..]);
    while !rest.is_empty() {
        let len = match rest[1] {
            0x04 => 20,
            0x0b => 32,
            0x0c => 48,
            _ => 64,
        };
        let (digest, next) = rest.split_at(2 + len);
        digests.push(digest);
        rest = next;
    }
    digests.sort();
    [&list[..4], &digests.concat()].concat()
}

/// Two folders with the state of one new TPM.
struct Twins {
    folder: tempfile::TempDir,
}

impl Twins {
    fn new() -> Twins {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("ours");
        fs::create_dir(&first).unwrap();
        manufacture(&first, &folder.path().join("authority"));
        let tpm = Swtpm::start_in(&first);
        tpm.tool(
            "tpm2_pcrallocate",
            &["sha1:all+sha256:all+sha384:all+sha512:all"],
        );
        tpm.tool("tpm2_shutdown", &["--clear"]);
        drop(tpm);
        let second = folder.path().join("theirs");
        fs::create_dir(&second).unwrap();
        for file in fs::read_dir(&first).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                fs::copy(file.path(), second.join(file.file_name())).unwrap();
            }
        }
        Twins { folder }
    }

    fn start(&self) -> [Recorded; 2] {
        ["ours", "theirs"].map(|name| Recorded::start(&self.folder.path().join(name)))
    }
}

fn only_what_the_peer_sends(ours: &Recorded, theirs: &Recorded) {
    let (ours, theirs) = (ours.sent(), theirs.sent());
    assert!(!ours.is_empty());
    let unknown: Vec<_> = ours.difference(&theirs).collect();
    // of the same command
    let similar = |one: &&String| unknown.iter().any(|command| command[..8] == one[..8]);
    let similar: Vec<_> = theirs.iter().filter(similar).collect();
    assert!(
        unknown.is_empty(),
        "ours: {unknown:#?}\ntheirs: {similar:#?}"
    );
}

#[test]
fn registers_keys_quotes_and_indices_are_asked_for_and_read_as_by_tpm2_tss() {
    let twins = Twins::new();
    let [ours, theirs] = twins.start();
    let hashes = [
        &ring::digest::SHA1_FOR_LEGACY_USE_ONLY,
        &ring::digest::SHA256,
        &ring::digest::SHA384,
        &ring::digest::SHA512,
    ];
    let digests = hashes.map(|hash| hex(ring::digest::digest(hash, EVENT).as_ref()));
    let expected = theirs.peer(&["keys", &digests.join(",")]);

    // the index that the peer writes
    let (index, size, file) = (
        format!("{INDEX:#x}"),
        SIZE.to_string(),
        twins.folder.path().join("index"),
    );
    fs::write(&file, (0..SIZE).map(|at| at as u8).collect::<Vec<_>>()).unwrap();
    let define = ["-C", "o", &index, "-s", &size, "-a", "ownerwrite|ownerread"];
    ours.tpm.tool("tpm2_nvdefine", &define);
    let write = ["-C", "o", &index, "-i", file.to_str().unwrap()];
    ours.tpm.tool("tpm2_nvwrite", &write);

    let mut tpm = Tpm::open(&ours.location()).unwrap();
    tpm.pcr_event(15, EVENT).unwrap();
    let (key, quotes) = tpm.quotes(KeySource::Own, NONCE, &[]).unwrap();
    let mut got = vec![];
    for bank in [Bank::Sha1, Bank::Sha256, Bank::Sha384, Bank::Sha512] {
        let values = tpm.pcrs(bank).unwrap().into_values().flatten().collect();
        got.push(("pcrs".to_owned(), values));
    }
    got.push(("key".to_owned(), key));
    for quote in &quotes {
        let end = quote.attest[quote.attest.len() - 32..].to_vec();
        got.push(("quoted".to_owned(), end));
    }
    for index in [INDEX, 0x01c0_0002, 0x01c0_0016] {
        got.push(("index".to_owned(), tpm.nv(index).unwrap().unwrap()));
    }
    assert_eq!(tpm.nv(INDEX + 1).unwrap(), None);
    // both certificates of the endorsement keys
    assert_eq!(tpm.endorsements().unwrap().len(), 2);
    drop(tpm);
    assert_eq!(got, expected);
    assert_eq!(quotes.len(), 4);
    only_what_the_peer_sends(&ours, &theirs);
}

#[test]
fn credentials_are_activated_as_by_tpm2_tss() {
    let kinds = [
        ("rsa", EndorsementKind::Rsa2048),
        ("p256", EndorsementKind::P256),
        ("p384", EndorsementKind::P384),
    ];
    let twins = Twins::new();
    let [ours, theirs] = twins.start();
    // both machines have the attestation key, which does not depend on the machine
    let location = |recorded: &Recorded| recorded.tpm.location().parse::<Location>().unwrap();
    let keys = [&ours, &theirs].map(|recorded| {
        Tpm::open(&location(recorded))
            .unwrap()
            .attestation_key(KeySource::Own)
            .unwrap()
    });
    assert_eq!(keys[0], keys[1]);
    let name = [
        &(Bank::Sha256 as u16).to_be_bytes()[..],
        ring::digest::digest(&ring::digest::SHA256, &keys[0]).as_ref(),
    ]
    .concat();
    let folder = twins.folder.path();
    fs::write(folder.join("secret"), b"a secret for the machine").unwrap();
    for (word, kind) in kinds {
        let file = |name: &str| folder.join(format!("{word}-{name}")).display().to_string();
        let (public, made) = (file("public"), file("credential"));
        let key = theirs.peer(&["endorsement-key", word]).remove(0).1;
        let len = (key.len() as u16).to_be_bytes();
        fs::write(&public, [&len[..], &key].concat()).unwrap();
        let secret = folder.join("secret").display().to_string();
        let (name, secret) = (hex(&name), ["--secret", &secret]);
        let for_key = ["--encryption-key", &public, "--name", &name];
        let to = ["--credential-blob", &made];
        theirs.tpm.tool(
            "tpm2_makecredential",
            &[&for_key[..], &secret, &to].concat(),
        );
        let credential = credential(&fs::read(&made).unwrap());
        let answers = theirs.peer(&[
            "activate",
            word,
            &hex(&credential.blob),
            &hex(&credential.secret),
        ]);
        let secret = answers.iter().find(|(word, _)| word == "secret").unwrap();
        assert_eq!(secret.1, b"a secret for the machine");
        let got = Tpm::open(&ours.location())
            .unwrap()
            .activate(KeySource::Own, kind, &credential)
            .unwrap();
        assert_eq!(got.expose(), secret.1, "{word}");
    }
    only_what_the_peer_sends_but_shutdowns(&ours, &theirs);
}

/// We announce after each use of the key that the power may fail, which the peer did in the other test.
fn only_what_the_peer_sends_but_shutdowns(ours: &Recorded, theirs: &Recorded) {
    ours.commands
        .lock()
        .unwrap()
        .retain(|command| code(command) != SHUTDOWN);
    only_what_the_peer_sends(ours, theirs);
}

/// Possible answers of a TPM that the host controls: each response of a quote in turn is cut off, or has more bytes than a response can have.
#[test]
fn a_response_of_another_length_is_an_error_or_changes_nothing() {
    let tpm = Swtpm::start();
    let quote = |location: &str| {
        let mut tpm = Tpm::open(&location.parse().unwrap())?;
        let (key, quotes) = tpm.quotes(KeySource::Own, NONCE, &[Bank::Sha256])?;
        Ok::<_, tpm::Error>((key, quotes.len()))
    };
    let genuine = quote(&tpm.location()).unwrap();
    let lengths: [fn(usize) -> usize; 5] = [
        |_| 10,
        |len| len / 2,
        |len| len - 1,
        |len| len + 1,
        |_| 5000,
    ];
    let mut errors = 0;
    for length in lengths {
        for altered in 0.. {
            let mut number = 0;
            let (sender, seen) = mpsc::channel();
            let proxy = Proxy::between(&tpm, move |mut client, mut server| {
                while let Some(command) = message(&mut client) {
                    server.write_all(&command).unwrap();
                    let mut response = message(&mut server).unwrap();
                    if number == altered {
                        response.resize(length(response.len()).max(10), 0);
                        let size = (response.len() as u32).to_be_bytes();
                        response[2..6].copy_from_slice(&size);
                        sender.send(()).unwrap();
                    }
                    number += 1;
                    // a program that has read enough may have closed the connection
                    let _ = client.write_all(&response);
                }
            });
            match quote(&proxy.location()) {
                Ok(got) => assert_eq!(got, genuine),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.starts_with("the TPM at swtpm:"), "{text}");
                    errors += 1;
                }
            }
            if seen.try_recv().is_err() {
                // the quote has fewer commands
                assert!(altered > 5, "{altered}");
                break;
            }
        }
    }
    assert!(errors > 15, "{errors}");
    assert_eq!(quote(&tpm.location()).unwrap(), genuine);
}

/// Reads a file of tpm2_makecredential: a header of 8 bytes, TPM2B_ID_OBJECT, TPM2B_ENCRYPTED_SECRET.
fn credential(file: &[u8]) -> Credential {
    let sized = |bytes: &[u8]| {
        let len = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        (bytes[2..2 + len].to_vec(), bytes[2 + len..].to_vec())
    };
    let (blob, rest) = sized(&file[8..]);
    let (secret, rest) = sized(&rest);
    assert!(rest.is_empty());
    Credential { blob, secret }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}
