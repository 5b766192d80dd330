//! Checks that `src/proto` is the code that prost generates from `proto/`.

use std::path::Path;

/// The messages that carry secrets.
const SECRET: [&str; 8] = [
    "init.InitRequest",
    "init.InitSuccessResponse",
    "join.IssueJoinTicketResponse",
    "join.control_plane_cert_or_key",
    "join.IssueRejoinTicketResponse",
    "kms.GetDataKeyResponse",
    "operator.KubeconfigResponse",
    "recoverproto.RecoverMessage",
];

#[test]
fn generated_messages_are_those_of_the_proto_files() {
    let files = [
        "attested.proto",
        "evidence.proto",
        "generation.proto",
        "init.proto",
        "join.proto",
        "kms.proto",
        "node.proto",
        "operator.proto",
        "recover.proto",
        "verify.proto",
    ];
    let root = Path::new(support::ROOT);
    let all = protox::compile(files, [root.join("proto")]).unwrap();
    let folder = root.join("src/proto");
    let fresh = tempfile::tempdir().unwrap();
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
        .compile_fds(all)
        .unwrap();
    for entry in std::fs::read_dir(fresh.path()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        let kept = folder.join(name);
        if std::env::var_os("UPDATE_PROTO").is_some() {
            std::fs::copy(&path, &kept).unwrap();
        }
        let read = |path| std::fs::read_to_string(path).unwrap();
        assert!(
            read(&path) == read(&kept),
            "{} is not up to date: run `make proto`",
            kept.display()
        );
    }
}
