//! Checks that `src/proto` and `src/booted_proto` are the code that prost generates from `proto/`.

use std::path::Path;

/// The messages that carry secrets.
const SECRET: [&str; 7] = [
    "init.InitRequest",
    "init.InitSuccessResponse",
    "join.IssueJoinTicketResponse",
    "join.control_plane_cert_or_key",
    "join.IssueRejoinTicketResponse",
    "kms.GetDataKeyResponse",
    "recoverproto.RecoverMessage",
];

#[test]
fn generated_messages_are_those_of_the_proto_files() {
    let root = Path::new(support::ROOT);
    let fresh = tempfile::tempdir().unwrap();
    let files = [
        "attested.proto",
        "evidence.proto",
        "init.proto",
        "join.proto",
        "kms.proto",
        "node.proto",
        "recover.proto",
        "verify.proto",
    ];
    let descriptors = protox::compile(files, [root.join("proto")]).unwrap();
    let mut config = prost_build::Config::new();
    for message in SECRET {
        config.message_attribute(
            message,
            "#[derive(zeroize::Zeroize, zeroize::ZeroizeOnDrop)]",
        );
    }
    config
        .out_dir(fresh.path())
        // prost's Debug prints every field, secrets too: these messages have none
        .skip_debug(["."])
        .message_attribute("components.Component", "#[derive(zeroize::Zeroize)]")
        .compile_fds(descriptors)
        .unwrap();
    for entry in std::fs::read_dir(fresh.path()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        let kept = ["src/booted_proto", "src/proto"].map(|folder| root.join(folder).join(name));
        let kept = kept.iter().find(|kept| kept.exists()).unwrap();
        if std::env::var_os("UPDATE_PROTO").is_some() {
            std::fs::copy(&path, kept).unwrap();
        }
        let (fresh, kept_text) = (
            std::fs::read_to_string(&path).unwrap(),
            std::fs::read_to_string(kept).unwrap(),
        );
        assert!(
            fresh == kept_text,
            "{} is not up to date: run `make proto`",
            kept.display()
        );
    }
}
