use std::os::unix::fs::PermissionsExt;

use super::*;

/// kubeadm's answer with a certificate and an authority that have these seconds left.
fn answer(left: i64, authority: i64, is_external: bool) -> String {
    let list = serde_json::json!({
        "kind": "CertificateExpirationInfo",
        "apiVersion": "output.kubeadm.k8s.io/v1alpha3",
        "certificates": [
            {"name": "apiserver", "expirationDate": "2027-11-26T23:00:00Z", "residualTime": left,
             "externallyManaged": is_external, "caName": "ca", "missing": false},
            {"name": "super-admin.conf", "expirationDate": null, "residualTime": 0,
             "externallyManaged": false, "missing": true},
        ],
        "certificateAuthorities": [
            {"name": "ca", "expirationDate": "2036-11-23T23:00:00Z", "residualTime": authority,
             "externallyManaged": false, "missing": false},
        ],
    });
    list.to_string()
}

fn read(left: i64, authority: i64, is_external: bool) -> List {
    List::read(answer(left, authority, is_external).as_bytes()).unwrap()
}

const YEARS: i64 = 9 * 365 * DAY;

#[test]
fn a_certificate_is_renewed_when_a_third_of_its_year_is_left() {
    let end_soon = |left, is_external| {
        let list = read(left, YEARS, is_external);
        assert_eq!(list.certificates.len(), 1, "one of the two is missing");
        list.end_soon()
    };
    assert!(!end_soon(365 * DAY, false));
    assert!(!end_soon(120 * DAY, false));
    assert!(end_soon(120 * DAY - 1, false));
    assert!(end_soon(-DAY, false));
    assert!(!end_soon(-DAY, true), "its authority is elsewhere");
}

#[test]
fn a_certificate_that_ends_with_its_authority_is_not_renewed_each_day() {
    assert!(!read(90 * DAY, 90 * DAY, false).end_soon());
    assert!(!read(90 * DAY, 91 * DAY, false).end_soon());
    assert!(read(90 * DAY, 92 * DAY, false).end_soon());
    assert!(!read(-DAY, -DAY, false).end_soon());
}

#[test]
fn the_log_says_when_a_certificate_or_an_authority_ends() {
    let list = read(90 * DAY + 5, 364 * DAY, false);
    assert_eq!(
        list.certificates[0].to_string(),
        "apiserver ends at 2027-11-26T23:00:00Z, in 90 days"
    );
    assert_eq!(
        list.authorities[0].to_string(),
        "ca ends at 2036-11-23T23:00:00Z, in 364 days"
    );
    assert_eq!(
        read(-3 * DAY - 5, YEARS, false).certificates[0].to_string(),
        "apiserver ended at 2027-11-26T23:00:00Z, 3 days ago"
    );
}

#[test]
fn another_form_of_the_list_is_an_error() {
    let whole = answer(1, 1, false);
    for end in 0..whole.len() {
        assert_eq!(List::read(&whole.as_bytes()[..end]), None);
    }
    for (from, to) in [
        ("residualTime", "residual"),
        ("certificateAuthorities", "authorities"),
        (r#""2027-11-26T23:00:00Z""#, "null"),
    ] {
        assert_eq!(
            List::read(whole.replace(from, to).as_bytes()),
            None,
            "{from}"
        );
    }
}

fn list_of(names: &[&str]) -> List {
    let certificate = |name: &&str| Certificate {
        name: (*name).to_owned(),
        end: String::new(),
        left: 0,
        authority: "ca".into(),
        is_external: false,
    };
    List {
        certificates: names.iter().map(certificate).collect(),
        authorities: vec![],
    }
}

#[test]
fn an_authority_gets_a_new_certificate_in_its_last_year() {
    let old = |authority| {
        let list = read(YEARS, authority, false);
        list.old_authorities()
            .map(Certificate::path)
            .collect::<Vec<_>>()
    };
    assert!(old(365 * DAY).is_empty());
    assert_eq!(old(365 * DAY - 1), ["pki/ca"]);
    assert_eq!(old(-DAY), ["pki/ca"]);
    let paths =
        ["ca", "etcd-ca", "front-proxy-ca"].map(|name| list_of(&[name]).certificates[0].path());
    assert_eq!(paths, ["pki/ca", "pki/etcd/ca", "pki/front-proxy-ca"]);
}

#[test]
fn a_renewal_that_was_interrupted_is_undone_before_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = PendingFile(folder.path());
    assert_eq!(file.read().unwrap(), None);
    fs::create_dir_all(folder.path().join("pki/etcd")).unwrap();
    let files = [
        ("scheduler.conf", "users: []", 0o600),
        ("pki/apiserver.crt", "certificate", 0o644),
        ("pki/apiserver.key", "key", 0o600),
        ("pki/etcd/server.crt", "etcd's", 0o644),
        ("pki/apiserver-etcd-client.crt", "client's", 0o644),
    ];
    for (name, text, _) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let list = list_of(&[
        "apiserver",
        "etcd-server",
        "apiserver-etcd-client",
        "scheduler.conf",
    ]);
    let mut pending = Pending {
        files: file.contents(&list).unwrap(),
        pods: vec!["etcd".into()],
    };
    assert_eq!(pending.files.len(), files.len());
    pending.restart(["kube-scheduler", "etcd"]);
    assert_eq!(pending.pods, ["kube-scheduler", "etcd"]);
    file.write(&pending).unwrap();
    let mode = |name: &str| {
        let metadata = fs::metadata(folder.path().join(name)).unwrap();
        metadata.permissions().mode() & 0o7777
    };
    assert_eq!(mode(PENDING), 0o600);
    // kubeadm has written into a full disk
    for (name, ..) in files {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let read = PendingFile(folder.path()).read().unwrap().unwrap();
    assert_eq!(read, pending);
    file.restore(&read).unwrap();
    for (name, text, expected) in files {
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), text);
        assert_eq!(mode(name), expected, "{name}");
    }
    file.sync(&read).unwrap();
    file.end().unwrap();
    file.end().unwrap();
    assert_eq!(file.read().unwrap(), None);
    for other in [
        "",
        "{}",
        "{\"files\": {\"a\": 1}, \"pods\": []}",
        "{\"files\": {}}",
    ] {
        fs::write(folder.path().join(PENDING), other).unwrap();
        assert!(matches!(file.read(), Err(Error::Pending)), "{other}");
    }
}
