//! Runs the commands that a node needs on the TPM at a location, by tpm2-tss, and prints each result: a word, and what the TPM returned as
//! hexadecimal numbers. `tests/tpm_commands.rs` compares results and commands with ours.
//!
//! tss-peer LOCATION keys DIGESTS                PCRs after the measurement of these digests (SHA-1, SHA-256, SHA-384, SHA-512, with commas
//!                                               between them), the attestation key, quotes, NV indices
//! tss-peer LOCATION endorsement-key KIND        the public area of the key; KIND is rsa, p256 or p384
//! tss-peer LOCATION activate KIND BLOB SECRET   the secret of a credential

use std::str::FromStr;

use tss_esapi::abstraction::{AsymmetricAlgorithmSelection, ek, nv};
use tss_esapi::attributes::{NvIndexAttributesBuilder, ObjectAttributesBuilder};
use tss_esapi::constants::{CapabilityType, SessionType, StartupType};
use tss_esapi::handles::{
    AuthHandle, KeyHandle, NvIndexHandle, NvIndexTpmHandle, PcrHandle, PersistentTpmHandle,
    TpmHandle,
};
use tss_esapi::interface_types::algorithm::{HashingAlgorithm, PublicAlgorithm};
use tss_esapi::interface_types::dynamic_handles::Persistent;
use tss_esapi::interface_types::ecc::EccCurve;
use tss_esapi::interface_types::key_bits::RsaKeyBits;
use tss_esapi::interface_types::resource_handles::{Hierarchy, NvAuth, Provision};
use tss_esapi::interface_types::session_handles::{AuthSession, PolicySession};
use tss_esapi::structures::{
    CapabilityData, Data, Digest, DigestValues, EncryptedSecret, HashScheme, IdObject, MaxNvBuffer,
    Nonce, NvPublicBuilder, PcrSelectionListBuilder, PcrSlot, Public, PublicBuilder, PublicKeyRsa,
    PublicRsaParametersBuilder, RsaExponent, RsaScheme, SignatureScheme, SymmetricDefinition,
};
use tss_esapi::traits::Marshall;
use tss_esapi::{Context, TctiNameConf};

/// The persistent handle of the attestation key.
const KEY: u32 = 0x8100_8f01;
/// An NV index of the test, and its size: more than one command reads.
const INDEX: u32 = 0x0180_0001;
const SIZE: usize = 700;
const NONCE: &[u8] = b"the verifier's own random number";
const PCR: PcrHandle = PcrHandle::Pcr15;
const BANKS: [HashingAlgorithm; 4] = [
    HashingAlgorithm::Sha1,
    HashingAlgorithm::Sha256,
    HashingAlgorithm::Sha384,
    HashingAlgorithm::Sha512,
];

fn print(word: &str, bytes: &[u8]) {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{word} {hex}");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut tpm = Context::new(TctiNameConf::from_str(&arguments[0]).unwrap()).unwrap();
    match &arguments[1..] {
        [what, digests] if what == "keys" => keys(&mut tpm, digests),
        [what, kind] if what == "endorsement-key" => drop(endorsement_key(&mut tpm, kind)),
        [what, kind, blob, secret] if what == "activate" => activate(&mut tpm, kind, blob, secret),
        _ => panic!("keys DIGESTS, endorsement-key KIND, or activate KIND BLOB SECRET"),
    }
}

fn keys(tpm: &mut Context, digests: &str) {
    let (CapabilityData::AssignedPcr(banks), _) =
        tpm.get_capability(CapabilityType::AssignedPcr, 0, 1).unwrap()
    else {
        panic!("no list of banks");
    };
    let mut measured = DigestValues::new();
    for (bank, digest) in BANKS.iter().zip(digests.split(',')) {
        measured.set(*bank, Digest::try_from(unhex(digest)).unwrap());
    }
    with_password(tpm, |tpm| tpm.pcr_extend(PCR, measured));
    for selection in banks.get_selections().iter().filter(|one| !one.is_empty()) {
        let bank = selection.hashing_algorithm();
        let mut values = vec![];
        for slots in selection.selected().chunks(8) {
            let (_, _, digests) = tpm.pcr_read(list(bank, slots)).unwrap();
            values.extend(digests.value().iter().flat_map(|digest| digest.to_vec()));
        }
        print("pcrs", &values);
    }

    let made = with_password(tpm, |tpm| {
        tpm.create_primary(Hierarchy::Owner, template(), None, None, None, None)
    });
    let at = Persistent::Persistent(PersistentTpmHandle::new(KEY).unwrap());
    let key: KeyHandle = with_password(tpm, |tpm| {
        tpm.evict_control(Provision::Owner, made.key_handle.into(), at)
    })
    .into();
    tpm.flush_context(made.key_handle.into()).unwrap();
    let (public, _, _) = tpm.read_public(key).unwrap();
    print("key", &public.marshall().unwrap());
    for selection in banks.get_selections().iter().filter(|one| !one.is_empty()) {
        let chosen = list(selection.hashing_algorithm(), &selection.selected());
        let (attest, _) = with_password(tpm, |tpm| {
            let data = Data::try_from(NONCE.to_vec()).unwrap();
            tpm.quote(key, data, SignatureScheme::Null, chosen.clone())
        });
        // the end is the digest of the selected PCRs
        let attest = attest.marshall().unwrap();
        print("quoted", &attest[attest.len() - 32..]);
    }
    tpm.shutdown(StartupType::Clear).unwrap();

    known_indices(tpm, 0x01c0_0000, 254);
    indices(tpm);
}

/// Asks which NV indices there are from `first` on.
fn known_indices(tpm: &mut Context, first: u32, count: u32) {
    let (CapabilityData::Handles(_), _) =
        tpm.get_capability(CapabilityType::Handles, first, count).unwrap()
    else {
        panic!("no list of handles");
    };
}

fn indices(tpm: &mut Context) {
    let index = NvIndexTpmHandle::new(INDEX).unwrap();
    let attributes = NvIndexAttributesBuilder::new()
        .with_owner_write(true)
        .with_owner_read(true)
        .build()
        .unwrap();
    let public = NvPublicBuilder::new()
        .with_nv_index(index)
        .with_index_name_algorithm(HashingAlgorithm::Sha256)
        .with_index_attributes(attributes)
        .with_data_area_size(SIZE)
        .build()
        .unwrap();
    let object = with_password(tpm, |tpm| tpm.nv_define_space(Provision::Owner, None, public.clone()));
    let data: Vec<u8> = (0..SIZE).map(|at| at as u8).collect();
    for (number, chunk) in data.chunks(512).enumerate() {
        let chunk = MaxNvBuffer::try_from(chunk.to_vec()).unwrap();
        with_password(tpm, |tpm| {
            tpm.nv_write(NvAuth::Owner, object, chunk.clone(), (number * 512) as u16)
        });
    }
    read(tpm, INDEX, object, NvAuth::Owner);
    for certificate in [0x01c0_0002, 0x01c0_0016] {
        let handle = TpmHandle::NvIndex(NvIndexTpmHandle::new(certificate).unwrap());
        let object = NvIndexHandle::from(tpm.tr_from_tpm_public(handle).unwrap());
        let (public, _) = tpm.nv_read_public(object).unwrap();
        let reader = if public.attributes().owner_read() {
NvAuth::Owner
        } else {
NvAuth::NvIndex(object)
        };
        read(tpm, certificate, object, reader);
    }
}

/// Reads an index in commands of 512 bytes, as we do, and as tpm2-tss itself does.
fn read(tpm: &mut Context, index: u32, object: NvIndexHandle, reader: NvAuth) {
    let (public, _) = tpm.nv_read_public(object).unwrap();
    let mut data = vec![];
    while data.len() < public.data_size() {
        let len = (public.data_size() - data.len()).min(512) as u16;
        let at = data.len() as u16;
        data.extend(with_password(tpm, |tpm| tpm.nv_read(reader, object, len, at)).to_vec());
    }
    let index = NvIndexTpmHandle::new(index).unwrap();
    let whole = with_password(tpm, |tpm| nv::read_full(tpm, reader, index));
    assert_eq!(data, whole);
    print("index", &data);
}

fn endorsement_key(tpm: &mut Context, kind: &str) -> KeyHandle {
    let algorithm = match kind {
        "rsa" => AsymmetricAlgorithmSelection::Rsa(RsaKeyBits::Rsa2048),
        "p256" => AsymmetricAlgorithmSelection::Ecc(EccCurve::NistP256),
        "p384" => AsymmetricAlgorithmSelection::Ecc(EccCurve::NistP384),
        _ => panic!("{kind}"),
    };
    let key = ek::create_ek_object_2(tpm, algorithm, None).unwrap();
    let (public, _, _) = tpm.read_public(key).unwrap();
    print("endorsement-key", &public.marshall().unwrap());
    key
}

fn activate(tpm: &mut Context, kind: &str, blob: &str, secret: &str) {
    // a vendor's nonce and template are behind the certificate
    let behind = match kind {
        "rsa" => 0x01c0_0003,
        "p256" => 0x01c0_000b,
        _ => 0x01c0_0017,
    };
    known_indices(tpm, behind, 2);
    let endorsement_key = endorsement_key(tpm, kind);
    let handle = TpmHandle::Persistent(PersistentTpmHandle::new(KEY).unwrap());
    let key = KeyHandle::from(tpm.tr_from_tpm_public(handle).unwrap());
    let session = match kind {
        "p384" => AuthSession::Password,
        _ => policy_session(tpm),
    };
    let sessions = (Some(AuthSession::Password), Some(session), None);
    let secret = tpm
        .execute_with_sessions(sessions, |tpm| {
            tpm.activate_credential(
                key,
                endorsement_key,
                IdObject::try_from(unhex(blob)).unwrap(),
                EncryptedSecret::try_from(unhex(secret)).unwrap(),
            )
        })
        .unwrap();
    print("secret", &secret);
    tpm.flush_context(endorsement_key.into()).unwrap();
}

fn policy_session(tpm: &mut Context) -> AuthSession {
    let session = tpm
        .start_auth_session(
            None,
            None,
            None,
            SessionType::Policy,
            SymmetricDefinition::AES_128_CFB,
            HashingAlgorithm::Sha256,
        )
        .unwrap()
        .unwrap();
    let policy = PolicySession::try_from(session).unwrap();
    with_password(tpm, |tpm| {
        tpm.policy_secret(
            policy,
            AuthHandle::Endorsement,
            Nonce::default(),
            Digest::default(),
            Nonce::default(),
            None,
        )
    });
    session
}

fn with_password<T>(
    tpm: &mut Context,
    command: impl FnOnce(&mut Context) -> tss_esapi::Result<T>,
) -> T {
    tpm.execute_with_session(Some(AuthSession::Password), command).unwrap()
}

fn list(bank: HashingAlgorithm, slots: &[PcrSlot]) -> tss_esapi::structures::PcrSelectionList {
    PcrSelectionListBuilder::new().with_selection(bank, slots).build().unwrap()
}

/// The template of the attestation key: RSA 2048, RSASSA with SHA-256.
fn template() -> Public {
    let attributes = ObjectAttributesBuilder::new()
        .with_fixed_tpm(true)
        .with_fixed_parent(true)
        .with_sensitive_data_origin(true)
        .with_user_with_auth(true)
        .with_restricted(true)
        .with_sign_encrypt(true)
        .build()
        .unwrap();
    let parameters = PublicRsaParametersBuilder::new()
        .with_scheme(RsaScheme::RsaSsa(HashScheme::new(HashingAlgorithm::Sha256)))
        .with_key_bits(RsaKeyBits::Rsa2048)
        .with_exponent(RsaExponent::default())
        .with_is_signing_key(true)
        .with_is_decryption_key(false)
        .with_restricted(true)
        .build()
        .unwrap();
    PublicBuilder::new()
        .with_public_algorithm(PublicAlgorithm::Rsa)
        .with_name_hashing_algorithm(HashingAlgorithm::Sha256)
        .with_object_attributes(attributes)
        .with_rsa_parameters(parameters)
        .with_rsa_unique_identifier(PublicKeyRsa::default())
        .build()
        .unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}
