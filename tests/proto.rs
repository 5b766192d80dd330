//! Checks that `src/proto` and `src/booted_proto` are the code that prost generates from `proto/`.

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

/// The messages of the package `join` that the initramfs needs: a node sends them at each boot but the first.
const REJOIN: [&str; 2] = ["IssueRejoinTicketRequest", "IssueRejoinTicketResponse"];

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
    let folders = ["src/proto", "src/booted_proto"].map(|folder| root.join(folder));
    for (folder, is_of_initramfs) in folders.iter().zip([true, false]) {
        let mut descriptors = all.clone();
        for file in &mut descriptors.file {
            if file.package() != "join" {
                continue;
            }
            let names = file.message_type.iter().map(|message| message.name());
            let belongs: Vec<bool> = names
                .map(|name| REJOIN.contains(&name) == is_of_initramfs)
                .collect();
            let mut is_kept = belongs.iter();
            file.message_type.retain(|_| *is_kept.next().unwrap());
            // comments belong to the numbers of messages (4 is the field `message_type`)
            let info = file.source_code_info.as_mut().unwrap();
            info.location.retain_mut(|location| {
                let [4, number, ..] = &mut location.path[..] else {
                    return true;
                };
                let at = *number as usize;
                *number = belongs[..at].iter().filter(|belongs| **belongs).count() as i32;
                belongs[at]
            });
        }
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
            .compile_fds(descriptors)
            .unwrap();
        for entry in std::fs::read_dir(fresh.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            let kept = folder.join(name);
            if !kept.exists() {
                assert!(folders.iter().any(|folder| folder.join(name).exists()));
                continue;
            }
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
}
