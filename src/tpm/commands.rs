//! The commands that a node needs, as bytes (TPM 2.0 part 3). Their parameters are not encrypted.
//! If the host emulates the TPM, the bus belongs to the host, and the data on it is public, except
//! the secret of a credential, which such a host could decrypt anyway.

use base::crypto::{Secret, random};

use super::answers::{self, NvPublic};
use super::bank::Bank;
use super::channel::{CommandError, Result, Tag, TpmChannel};

/// TPM_RH_OWNER, TPM_RH_ENDORSEMENT, TPM_RH_NULL, TPM_RS_PW (part 2 §7.4).
pub const OWNER: u32 = 0x4000_0001;
pub const ENDORSEMENT: u32 = 0x4000_000b;
const NULL: u32 = 0x4000_0007;
const PASSWORD: u32 = 0x4000_0009;
/// Command codes (part 2 §6.5.2).
const EVICT_CONTROL: u32 = 0x120;
const NV_UNDEFINE_SPACE: u32 = 0x122;
const NV_DEFINE_SPACE: u32 = 0x12a;
const CREATE_PRIMARY: u32 = 0x131;
const NV_WRITE: u32 = 0x137;
const SHUTDOWN: u32 = 0x145;
const ACTIVATE_CREDENTIAL: u32 = 0x147;
const NV_READ: u32 = 0x14e;
const POLICY_SECRET: u32 = 0x151;
const QUOTE: u32 = 0x158;
const NV_READ_PUBLIC: u32 = 0x169;
const READ_PUBLIC: u32 = 0x173;
const START_AUTH_SESSION: u32 = 0x176;
const GET_CAPABILITY: u32 = 0x17a;
const PCR_READ: u32 = 0x17e;
const PCR_EXTEND: u32 = 0x182;
/// TPM_CAP_HANDLES, TPM_CAP_PCRS (part 2 §6.12), TPM_ALG_NULL (§6.3), TPM_SE_POLICY (§6.11).
const CAP_HANDLES: u32 = 1;
const CAP_PCRS: u32 = 5;
const ALG_NULL: u16 = 0x0010;
const SE_POLICY: u8 = 1;
/// TPMA_NV_OWNERREAD (part 2 §13.4).
const OWNER_READ: u32 = 1 << 17;
/// The bytes that every TPM reads or writes in one NV command.
const CHUNK: usize = 512;
/// An empty TPM2B.
const EMPTY: &[u8] = &[0, 0];

/// Encodes bytes, preceded by their length (TPM2B, part 2 §10.4.1).
pub fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes(), bytes].concat()
}

/// One entry of an authorization area (TPMS_AUTH_COMMAND, part 2 §10.13.2).
pub struct Authorization<'a> {
    pub session: u32,
    pub nonce: &'a [u8],
    pub attributes: u8,
    pub value: &'a [u8],
}

impl Authorization<'_> {
    const fn of(session: u32, value: &[u8]) -> Authorization<'_> {
        Authorization {
            session,
            nonce: &[],
            attributes: 0,
            value,
        }
    }
}

/// The empty password.
const NO_PASSWORD: &[Authorization<'_>] = &[Authorization::of(PASSWORD, &[])];

impl TpmChannel {
    /// Runs a command without authorization, and reads the parameters of its response.
    fn plain<T>(
        &mut self,
        code: u32,
        parts: &[&[u8]],
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T> {
        let response = self.run(Tag::NoSessions, code, parts)?;
        read(&response).ok_or(CommandError::Malformed)
    }

    /// Runs a command whose first handles need authorization; returns the bytes after the header of
    /// its response.
    fn with_sessions(
        &mut self,
        code: u32,
        handles: &[u32],
        authorizations: &[Authorization<'_>],
        parameters: &[&[u8]],
    ) -> Result<Vec<u8>> {
        let mut area = vec![];
        for entry in authorizations {
            area.extend(entry.session.to_be_bytes());
            area.extend(sized(entry.nonce));
            area.push(entry.attributes);
            area.extend(sized(entry.value));
        }
        let handles: Vec<_> = handles
            .iter()
            .flat_map(|handle| handle.to_be_bytes())
            .collect();
        let len = (area.len() as u32).to_be_bytes();
        let parts = [&[&handles[..], &len, &area], parameters].concat();
        self.run(Tag::Sessions, code, &parts)
    }

    /// Runs a command whose first handles need authorization, and returns the parameters of its
    /// response.
    pub fn authorized(
        &mut self,
        code: u32,
        handles: &[u32],
        authorizations: &[Authorization<'_>],
        parameters: &[&[u8]],
    ) -> Result<Vec<u8>> {
        let response = self.with_sessions(code, handles, authorizations, parameters)?;
        answers::of_sessions(&response).ok_or(CommandError::Malformed)
    }

    fn capability<T>(
        &mut self,
        asked: [u32; 3],
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T> {
        let asked = asked.map(u32::to_be_bytes);
        self.plain(GET_CAPABILITY, &[asked.as_flattened()], read)
    }

    /// Returns the allocated banks of PCRs that this program knows, with their PCRs.
    pub fn banks(&mut self) -> Result<Vec<(Bank, Vec<u32>)>> {
        self.capability([CAP_PCRS, 0, 1], answers::banks)
    }

    /// Returns at most `count` existing handles, starting with this one.
    pub fn handles(&mut self, from: u32, count: u32) -> Result<Vec<u32>> {
        self.capability([CAP_HANDLES, from, count], answers::handles)
    }

    /// Returns the values of these PCRs, at most 8.
    pub fn pcr_read(&mut self, bank: Bank, slots: &[u32]) -> Result<Vec<Vec<u8>>> {
        self.plain(PCR_READ, &[&selection(bank, slots)], answers::pcrs)
    }

    /// Extends a PCR in several banks.
    pub fn pcr_extend(&mut self, pcr: u32, digests: &[(Bank, Vec<u8>)]) -> Result<()> {
        let mut values = (digests.len() as u32).to_be_bytes().to_vec();
        for (bank, digest) in digests {
            values.extend((*bank as u16).to_be_bytes());
            values.extend(digest);
        }
        self.authorized(PCR_EXTEND, &[pcr], NO_PASSWORD, &[&values])
            .map(drop)
    }

    /// Returns TPMS_ATTEST and TPMT_SIGNATURE, signed by the scheme of the key.
    pub fn quote(
        &mut self,
        key: u32,
        nonce: &[u8],
        bank: Bank,
        slots: &[u32],
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let (nonce, scheme) = (sized(nonce), ALG_NULL.to_be_bytes());
        let parameters = [&nonce[..], &scheme, &selection(bank, slots)];
        let answer = self.authorized(QUOTE, &[key], NO_PASSWORD, &parameters)?;
        answers::quote(&answer).ok_or(CommandError::Malformed)
    }

    /// Returns TPMT_PUBLIC. The error is [`HANDLE`](super::response_code::HANDLE) if there is no
    /// such key.
    pub fn read_public(&mut self, handle: u32) -> Result<Vec<u8>> {
        self.plain(READ_PUBLIC, &[&handle.to_be_bytes()], answers::first)
    }

    /// Creates a primary key from a template (TPMT_PUBLIC); returns its handle and TPMT_PUBLIC. The
    /// handle is valid until it is flushed, or the channel is closed.
    pub fn create_primary(&mut self, hierarchy: u32, template: &[u8]) -> Result<(u32, Vec<u8>)> {
        // inSensitive has neither a password nor data; no outsideInfo; no creationPCR
        let parameters: [&[u8]; 4] = [&[0, 4, 0, 0, 0, 0], &sized(template), EMPTY, &[0, 0, 0, 0]];
        let response =
            self.with_sessions(CREATE_PRIMARY, &[hierarchy], NO_PASSWORD, &parameters)?;
        let (handle, public) = answers::created(&response).ok_or(CommandError::Malformed)?;
        self.created.push(handle);
        Ok((handle, public))
    }

    /// Makes a transient key persistent at this handle, or removes the persistent key at it.
    pub fn evict(&mut self, key: u32, persistent: u32) -> Result<()> {
        let persistent = persistent.to_be_bytes();
        self.authorized(EVICT_CONTROL, &[OWNER, key], NO_PASSWORD, &[&persistent])
            .map(drop)
    }

    /// Announces that the power may fail (TPM_SU_CLEAR). The TPM remains usable.
    pub fn shutdown(&mut self) -> Result<()> {
        self.run(Tag::NoSessions, SHUTDOWN, &[&[0, 0]]).map(drop)
    }

    /// Returns the public data of an NV index. The error is
    /// [`HANDLE`](super::response_code::HANDLE) if it does not exist.
    pub fn nv_public(&mut self, index: u32) -> Result<NvPublic> {
        self.plain(NV_READ_PUBLIC, &[&index.to_be_bytes()], answers::nv_public)
    }

    /// Reads an NV index, with this password if the owner may not read it.
    pub fn nv_read(&mut self, index: u32, password: &[u8]) -> Result<Vec<u8>> {
        let NvPublic {
            attributes, size, ..
        } = self.nv_public(index)?;
        let (reader, password) = match attributes & OWNER_READ {
            0 => (index, password),
            _ => (OWNER, &[][..]),
        };
        let authorization = [Authorization::of(PASSWORD, password)];
        let mut data = Vec::with_capacity(size);
        while data.len() < size {
            let len = CHUNK.min(size - data.len());
            let asked = [len as u16, data.len() as u16].map(u16::to_be_bytes);
            let handles = [reader, index];
            let answer =
                self.authorized(NV_READ, &handles, &authorization, &[asked.as_flattened()])?;
            let chunk = answers::first(&answer).filter(|chunk| chunk.len() == len);
            data.extend(chunk.ok_or(CommandError::Malformed)?);
        }
        Ok(data)
    }

    /// Writes an NV index, with its password, from its first byte on.
    pub fn nv_write(&mut self, index: u32, password: &[u8], data: &[u8]) -> Result<()> {
        let authorization = [Authorization::of(PASSWORD, password)];
        for (number, chunk) in data.chunks(CHUNK).enumerate() {
            let at = ((number * CHUNK) as u16).to_be_bytes();
            let parameters: [&[u8]; 2] = [&sized(chunk), &at];
            self.authorized(NV_WRITE, &[index; 2], &authorization, &parameters)?;
        }
        Ok(())
    }

    /// Defines an NV index of the owner with these attributes (TPMA_NV). `hash` makes its Name.
    pub fn nv_define(
        &mut self,
        index: u32,
        hash: Bank,
        attributes: u32,
        size: usize,
        password: &[u8],
    ) -> Result<()> {
        let public = [
            &index.to_be_bytes()[..],
            &(hash as u16).to_be_bytes(),
            &attributes.to_be_bytes(),
            EMPTY,
            &(size as u16).to_be_bytes(),
        ];
        let parameters: [&[u8]; 2] = [&sized(password), &sized(&public.concat())];
        self.authorized(NV_DEFINE_SPACE, &[OWNER], NO_PASSWORD, &parameters)
            .map(drop)
    }

    /// Removes an NV index.
    pub fn nv_undefine(&mut self, index: u32) -> Result<()> {
        self.authorized(NV_UNDEFINE_SPACE, &[OWNER, index], NO_PASSWORD, &[])
            .map(drop)
    }

    /// Starts a session of this kind (TPM_SE) over this hash, neither salted nor bound; returns its
    /// handle and the TPM's nonce.
    pub fn start_session(&mut self, kind: u8, hash: Bank, nonce: &[u8]) -> Result<(u32, Vec<u8>)> {
        let parts: [&[u8]; 7] = [
            &NULL.to_be_bytes(),
            &NULL.to_be_bytes(),
            &sized(nonce),
            EMPTY,
            &[kind],
            &ALG_NULL.to_be_bytes(),
            &(hash as u16).to_be_bytes(),
        ];
        self.plain(START_AUTH_SESSION, &parts, answers::session)
    }

    /// Returns a policy session that proves the empty password of the endorsement hierarchy: policy
    /// A of the EK credential profile.
    fn endorsement_session(&mut self) -> Result<u32> {
        let (session, _) = self.start_session(SE_POLICY, Bank::Sha256, &random::<32>())?;
        // no nonceTPM, cpHashA, policyRef; expiration 0
        let handles = [ENDORSEMENT, session];
        let proved = self.authorized(POLICY_SECRET, &handles, NO_PASSWORD, &[&[0; 10]]);
        self.end_after_error(session, &proved);
        proved.map(|_| session)
    }

    /// Returns the secret of a credential for `key`, which is encrypted for `endorsement_key`. The
    /// empty password authorizes the use of the endorsement key, or policy A does.
    pub fn activate_credential(
        &mut self,
        key: u32,
        endorsement_key: u32,
        has_password: bool,
        blob: &[u8],
        secret: &[u8],
    ) -> Result<Secret> {
        let session = if has_password {
            PASSWORD
        } else {
            self.endorsement_session()?
        };
        let authorizations = [PASSWORD, session].map(|one| Authorization::of(one, &[]));
        let parameters: [&[u8]; 2] = [&sized(blob), &sized(secret)];
        let handles = [key, endorsement_key];
        let activated =
            self.authorized(ACTIVATE_CREDENTIAL, &handles, &authorizations, &parameters);
        if !has_password {
            self.end_after_error(session, &activated);
        }
        answers::secret(&activated?).ok_or(CommandError::Malformed)
    }

    /// Ends a session: a command that succeeds ends it by itself, without the attribute
    /// continueSession.
    fn end_after_error<T>(&mut self, session: u32, result: &Result<T>) {
        if result.is_err()
            && let Err(why) = self.flush(session)
        {
            log::debug!("cannot end session {session:#x} of the TPM: {why}");
        }
    }
}

/// Encodes TPML_PCR_SELECTION with one bank.
fn selection(bank: Bank, slots: &[u32]) -> Vec<u8> {
    let bits = slots.iter().fold(0u32, |bits, slot| bits | 1 << slot);
    let [low, middle, high, _] = bits.to_le_bytes();
    let mut selection = vec![0, 0, 0, 1];
    selection.extend((bank as u16).to_be_bytes());
    selection.extend([3, low, middle, high]);
    selection
}
