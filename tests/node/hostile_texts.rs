//! A node that meets the policy, and sends texts that would forge or hide lines on the operator's terminal. The tests run every
//! command that shows texts of a node, for people and as JSON.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;

use base::text::is_visible;
use proto::init::init_response::Kind;
use proto::init::{InitFailureResponse, InitRequest, InitResponse, ProgressResponse};
use proto::node::{TimelineRequest, TimelineResponse};
use proto::recoverproto::{RecoverMessage, RecoverResponse, StatusRequest, StatusResponse};
use rpc::grpc::{Call, Code, Limits, Router, Sender, Server, Status};
use serde_json::Value;

use crate::forger::Forger;
use crate::setting::{MASTER_KEY, Setting, set_private};

/// The text of a node: colours, a cleared line, an order from right to left, invisible characters, and a line as the commands have them.
const HOSTILE: &str = "a\x1b[2Jb\r\u{7f}\u{9b}1m\u{202e}\u{2066}\u{200b}\u{2028}\u{e0041}\n\
                       10.0.0.1:9000 (InitServer): attested, meets the policy\n  Key:         000b";
/// The beginning of the line that it forges.
const FORGED: &str = "10.0.0.1:9000 (InitServer)";

fn node() -> Server {
    let status = |_: &Call, _: StatusRequest| {
        Ok(StatusResponse {
            disk_uuid: HOSTILE.into(),
            state: HOSTILE.into(),
            waiting_for: vec![HOSTILE.into(), HOSTILE.into()],
            waiting_seconds: 5,
        })
    };
    let recover = |_: &Call, _: RecoverMessage| -> Result<RecoverResponse, Status> {
        Err(Status::new(Code::Internal, HOSTILE))
    };
    let timeline = |_: &Call, _: TimelineRequest| {
        let record = format!("firstlight[unlock]    3.214s mapped: {HOSTILE}");
        Ok(TimelineResponse {
            record,
            clock_synchronized: Some(false),
        })
    };
    let init = |_: &Call, _: InitRequest, to: &mut Sender<InitResponse>| {
        for (line, millis) in [("", 1), (HOSTILE, 2), ("", 3)] {
            let progress = ProgressResponse {
                phase: HOSTILE.into(),
                line: line.into(),
                elapsed_millis: millis,
            };
            let kind = Some(Kind::Progress(progress));
            to.send(&InitResponse { kind })?;
        }
        let error = HOSTILE.into();
        let kind = Some(Kind::InitFailure(InitFailureResponse { error }));
        to.send(&InitResponse { kind })
    };
    let router = Router::new()
        .unary("/recoverproto.API/Status", status)
        .unary("/recoverproto.API/Recover", recover)
        .unary("/node.API/Timeline", timeline)
        .server_streaming("/init.API/Init", init);
    let tls = atls::Server::new(Some(Arc::new(Forger::new())), None);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start("node", listener, Arc::new(tls), router, Limits::default()).unwrap()
}

/// Returns the text that a command prints on standard output and on standard error.
fn run(command: &mut Command) -> [String; 2] {
    let output = command.output().unwrap();
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap())
}

fn check(what: &str, text: &str) {
    let is_shown = |c: char| c == '\n' || is_visible(c);
    assert!(text.chars().all(is_shown), "{what}: {text:?}");
    assert!(
        !text.lines().any(|line| line.starts_with(FORGED)),
        "{what}: {text}"
    );
}

#[test]
fn no_command_lets_a_node_forge_a_line_or_hide_one() {
    let (setting, node) = (Setting::new(), node());
    let address = node.local_addr().to_string();
    let secret = setting.file("init-secret", "secret");
    set_private(&secret);
    let master_secret = setting.master_secret(MASTER_KEY).display().to_string();
    let policy = setting.policy_of(&[(15, [0; 32])]).display().to_string();
    let secret = secret.display().to_string();
    for (what, args) in [
        ("status", vec!["status", &address]),
        ("status", vec!["status", &address, "--timeline"]),
        (
            "recover",
            vec!["recover", "--status", "--endpoint", &address],
        ),
        (
            "recover",
            vec![
                "recover",
                "--endpoint",
                &address,
                "--master-secret",
                &master_secret,
            ],
        ),
        (
            "init",
            vec![
                "init",
                "--verbose",
                "--endpoint",
                &address,
                "--init-secret",
                &secret,
                "--require=any",
            ],
        ),
    ] {
        let trust: &[&str] = match what {
            "status" => &[],
            _ => &["--trust-any-tpm"],
        };
        let usual = ["--policy", &policy, "--timeout", "20s"];
        let args = [&args[..], &usual, trust].concat();
        let [said, errors] = run(&mut setting.firstlight(&args));
        check(what, &said);
        check(what, &errors);
        assert!(
            format!("{said}{errors}").contains("a\\u001b[2Jb\\u000d") || what == "status",
            "{what}: the text was not shown: {said}{errors}"
        );
        // what this node says of its clock is no text
        assert_eq!(
            said.contains("  Clock:       no time service has set it"),
            what == "status",
            "{said}"
        );
        let [json, errors] = run(setting.firstlight(&args).args(["-o", "json"]));
        check(what, &json);
        check(what, &errors);
        // the escapes are those of JSON, so a program reads the node's text unchanged
        let read: Option<Value> = (!json.is_empty()).then(|| serde_json::from_str(&json).unwrap());
        match read {
            Some(read) if what == "status" => {
                assert_eq!(read["servers"][0]["waiting"]["state"], HOSTILE);
                assert_eq!(read["servers"][0]["clockSynchronized"], false);
            }
            Some(read) if read.get("error").is_some() => {
                let text = read["error"]["text"].as_str().unwrap();
                assert!(text.contains(HOSTILE), "{what}: {text:?}");
            }
            Some(read) => assert_eq!(read["state"], HOSTILE, "{what}"),
            None => {}
        }
    }
}
