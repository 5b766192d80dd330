//! The vendors' roots of trust: this folder has every certificate that the programs trust by
//! default, and [`ALL`] lists it. A policy names a root, or contains other roots.
//! [`chain`] says why a chain of certificates is refused.
//!
//! A test compares the table with the files, and fails 90 days before a certificate expires.

pub mod chain;

/// What a root certifies. A root is trusted for nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Endorsement and attestation keys of TPMs.
    TpmKeys,
    /// Attestation keys of TPMs, but no endorsement keys.
    AttestationKeys,
    /// The keys of AMD's chips that sign reports of SEV-SNP.
    SnpReports,
    /// The keys of Intel's platforms that sign TDX quotes, and Intel's published data about
    /// platforms.
    TdxQuotes,
    /// Documents of the Nitro hypervisor.
    NitroDocuments,
}

/// A root, with the intermediate certificates that machines do not send themselves.
#[derive(Debug)]
pub struct Root {
    /// The name in a policy.
    pub name: &'static str,
    /// The vendor.
    pub vendor: &'static str,
    /// What it certifies.
    pub purpose: Purpose,
    /// Where the certificates were downloaded.
    pub source: &'static str,
    /// The root.
    pub root: PinnedCertificate,
    /// The certificates below the root.
    pub between: &'static [PinnedCertificate],
}

/// A certificate.
#[derive(Debug)]
pub struct PinnedCertificate {
    /// The common name of its subject.
    pub subject: &'static str,
    /// SHA-256 of its bytes in hexadecimal.
    pub sha256: &'static str,
    /// The last day on which it is valid (UTC).
    pub expires: &'static str,
    /// Its bytes (DER).
    pub der: &'static [u8],
}

/// All roots, by vendor.
pub const ALL: &[&Root] = &[
    &AMD_MILAN,
    &AMD_GENOA,
    &AMD_TURIN,
    &AWS_NITRO,
    &GOOGLE_2018,
    &GOOGLE_2022,
    &INTEL_SGX,
    &AZURE_2023,
    &MICROSOFT_2021,
];

/// AMD's certificates of a product: https://kdsintf.amd.com/vcek/v1/PRODUCT/cert_chain and
/// /vlek/v1/PRODUCT/cert_chain.
const AMD: &str =
    "the Go module github.com/google/go-sev-guest v0.15.0 (verify/trust), the crate sev 8.0.0";
/// Google verifies its shielded VMs with these.
const GOOGLE: &str = "the Go module github.com/google/go-tpm-tools v0.4.11 (server/ca-certs)";

/// Milan (family 19h, models 00h to 0Fh).
pub const AMD_MILAN: Root = Root {
    name: "amd-milan",
    vendor: "AMD",
    purpose: Purpose::SnpReports,
    source: AMD,
    root: PinnedCertificate {
        subject: "ARK-Milan",
        sha256: "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd",
        expires: "2045-10-22",
        der: include_bytes!("amd/ark-milan.der"),
    },
    between: &[
        PinnedCertificate {
            subject: "SEV-Milan",
            sha256: "67d303bd3905fd38db8b20e0793699870e7fa612eaad5dec358293fd8c0bac1b",
            expires: "2045-10-22",
            der: include_bytes!("amd/ask-milan.der"),
        },
        PinnedCertificate {
            subject: "SEV-VLEK-Milan",
            sha256: "c5e081f59b7efab1fe2f8b505e159704e72f29cab7ef7cf628a05a42439082f5",
            expires: "2047-11-16",
            der: include_bytes!("amd/asvk-milan.der"),
        },
    ],
};

/// Genoa, Bergamo and Siena (family 19h, models 10h to 1Fh and A0h to AFh).
pub const AMD_GENOA: Root = Root {
    name: "amd-genoa",
    vendor: "AMD",
    purpose: Purpose::SnpReports,
    source: AMD,
    root: PinnedCertificate {
        subject: "ARK-Genoa",
        sha256: "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1",
        expires: "2047-01-26",
        der: include_bytes!("amd/ark-genoa.der"),
    },
    between: &[
        PinnedCertificate {
            subject: "SEV-Genoa",
            sha256: "5464738c1546aed5f2cecf1dc98c5c960a92e8913238a61711bc90ec6e828521",
            expires: "2047-10-31",
            der: include_bytes!("amd/ask-genoa.der"),
        },
        PinnedCertificate {
            subject: "SEV-VLEK-Genoa",
            sha256: "197e610743a917d6b9bb982a5a9226ccc0a15b611be0619e626aca9151457372",
            expires: "2047-11-18",
            der: include_bytes!("amd/asvk-genoa.der"),
        },
    ],
};

/// Turin (family 1Ah, models 00h to 11h).
pub const AMD_TURIN: Root = Root {
    name: "amd-turin",
    vendor: "AMD",
    purpose: Purpose::SnpReports,
    source: AMD,
    root: PinnedCertificate {
        subject: "ARK-Turin",
        sha256: "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",
        expires: "2048-05-15",
        der: include_bytes!("amd/ark-turin.der"),
    },
    between: &[
        PinnedCertificate {
            subject: "SEV-Turin",
            sha256: "5b77ef5fe7a7a004fd9032668fba9d0fda22f88c4442069a479636a6ae3b3185",
            expires: "2048-05-15",
            der: include_bytes!("amd/ask-turin.der"),
        },
        PinnedCertificate {
            subject: "SEV-VLEK-Turin",
            sha256: "104e10a8bd060a3c20a434261a57d0588fd65a88915b4f65b08bdecaf8df1a3c",
            expires: "2048-05-15",
            der: include_bytes!("amd/asvk-turin.der"),
        },
    ],
};

/// Nitro enclaves and NitroTPM.
pub const AWS_NITRO: Root = Root {
    name: "aws-nitro",
    vendor: "AWS",
    purpose: Purpose::NitroDocuments,
    source: "https://aws-nitro-enclaves.amazonaws.com/AWS_NitroEnclaves_Root-G1.zip",
    root: PinnedCertificate {
        subject: "aws.nitro-enclaves",
        sha256: "641a0321a3e244efe456463195d606317ed7cdcc3c1756e09893f3c68f79bb5b",
        expires: "2049-10-28",
        der: include_bytes!("aws/nitro-enclaves.der"),
    },
    between: &[],
};

/// The older hierarchy of shielded VMs.
pub const GOOGLE_2018: Root = Root {
    name: "google-2018",
    vendor: "Google",
    purpose: Purpose::TpmKeys,
    source: GOOGLE,
    root: PinnedCertificate {
        subject: "tpm_ek_v1_cloud_host_root-signer-0-2018-04-06T10:58:26-07:00 K:1, 1:Pw003HsFYO4:0:18",
        sha256: "9bd5285f8fb18502a7947e621ffd470266f49fcd3b73e19a190f690ad32a7caf",
        expires: "2118-04-06",
        der: include_bytes!("google/host-root-2018.der"),
    },
    between: &[
        PinnedCertificate {
            subject: "tpm_ek_v1_cloud_host-signer-0-2020-10-22T14:02:08-07:00 K:1, 2:HBNpA3TPAbM:0:18",
            sha256: "5d8dbcf8c8053dd8ffad711b6219355032b7122c34cac0f90ccb49def69ec504",
            expires: "2120-10-22",
            der: include_bytes!("google/host-signer-2020.der"),
        },
        PinnedCertificate {
            subject: "tpm_ek_v1_cloud_host-signer-0-2021-10-12T04:22:11-07:00 K:1, 3:nbvaGZFLcuc:0:18",
            sha256: "7132b6ea71101f6c51bb58f98c3798c19b65be510eca0344318900510b593178",
            expires: "2121-10-12",
            der: include_bytes!("google/host-signer-2021.der"),
        },
    ],
};

/// The newer hierarchy of shielded VMs.
pub const GOOGLE_2022: Root = Root {
    name: "google-2022",
    vendor: "Google",
    purpose: Purpose::TpmKeys,
    source: "the Go module github.com/google/go-tpm-tools v0.4.11 (server/ca-certs), and for the authorities of 2024 the \
             URLs in certificates of machines, http://privateca-content-ID.storage.googleapis.com/ID/ca.crt",
    root: PinnedCertificate {
        subject: "EK/AK CA Root",
        sha256: "594759594b9b61524f6c8ef668f7177f7b9066bc0674f2f49fe9e052be78beb2",
        expires: "2122-07-08",
        der: include_bytes!("google/ek-ak-root.der"),
    },
    // machines do not send their CA: a verifier fetches a CA that is not in this table
    between: &[
        PinnedCertificate {
            subject: "EK/AK CA Intermediate",
            sha256: "c84de8116dfaf5a908f21e810487791f5437e206d00ad8025050cca6bd2ff627",
            expires: "2122-07-08",
            der: include_bytes!("google/ek-ak-intermediate.der"),
        },
        // since February 2024 a pool of at least three issues the certificates, also those of one machine; these two, and one
        // with the key ID 04:6E:73:58
        PinnedCertificate {
            subject: "EK/AK CA Intermediate",
            sha256: "02f507068014de60d15fee5901513a03040baa922143143bc50288b55b24bceb",
            expires: "2122-07-08",
            der: include_bytes!("google/ek-ak-intermediate-2024-0f21.der"),
        },
        PinnedCertificate {
            subject: "EK/AK CA Intermediate",
            sha256: "890a2385c112b40c1b61229104bc366a79a415891402ffd70f6325f87dcd9d5f",
            expires: "2122-07-08",
            der: include_bytes!("google/ek-ak-intermediate-2024-67c3.der"),
        },
    ],
};

/// SGX and TDX.
pub const INTEL_SGX: Root = Root {
    name: "intel-sgx",
    vendor: "Intel",
    purpose: Purpose::TdxQuotes,
    source: "https://certificates.trustedservices.intel.com/Intel_SGX_Provisioning_Certification_RootCA.cer",
    root: PinnedCertificate {
        subject: "Intel SGX Root CA",
        sha256: "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3",
        expires: "2049-12-31",
        der: include_bytes!("intel/sgx.der"),
    },
    between: &[],
};

/// The TPMs of Azure's machines since 2023.
pub const AZURE_2023: Root = Root {
    name: "azure-2023",
    vendor: "Microsoft",
    purpose: Purpose::AttestationKeys,
    source: "https://learn.microsoft.com/en-us/azure/virtual-machines/trusted-launch-faq",
    root: PinnedCertificate {
        subject: "Azure Virtual TPM Root Certificate Authority 2023",
        sha256: "e6c596b17f8ffefba5c300f714cfb1260c6028704ecf7becc4ab5018efb00e95",
        expires: "2048-06-01",
        der: include_bytes!("microsoft/azure-2023.der"),
    },
    between: &[
        // the certificates that it issued do not contain its URL
        PinnedCertificate {
            subject: "Global Virtual TPM CA - 03",
            sha256: "fd7c92dabce4dcec9feaa30f8b087ada0598413189182152b881f5564064a29c",
            expires: "2027-04-24",
            der: include_bytes!("microsoft/global-virtual-tpm-ca-03.der"),
        },
        // the CAs of the regions are below it
        PinnedCertificate {
            subject: "Azure Cloud Virtual TPM CA 2025",
            sha256: "41a1675dc1b7df8a5c59c8101c697ce500d0fa5f09bcdaa431bc4a3652363b14",
            expires: "2031-08-05",
            der: include_bytes!("microsoft/azure-cloud-virtual-tpm-ca-2025.der"),
        },
    ],
};

/// The TPMs of Azure's older machines.
pub const MICROSOFT_2021: Root = Root {
    name: "microsoft-2021",
    vendor: "Microsoft",
    purpose: Purpose::AttestationKeys,
    source: "http://www.microsoft.com/pkiops/certs/Microsoft%20RSA%20Devices%20Root%20CA%202021.crt",
    root: PinnedCertificate {
        subject: "Microsoft RSA Devices Root CA 2021",
        sha256: "8c2bb9144d4970c94fb8105cc5d860a58e2e675eb360fdd8c14b30833aaaec1d",
        expires: "2046-08-26",
        der: include_bytes!("microsoft/microsoft-2021.der"),
    },
    between: &[],
};

/// Returns the root with this name if it certifies keys of this kind.
pub fn named(name: &str, purpose: Purpose) -> Option<&'static Root> {
    certifying(purpose).find(|root| root.name == name)
}

/// Returns the roots that certify keys of this kind.
pub fn certifying(purpose: Purpose) -> impl Iterator<Item = &'static Root> {
    let all = ALL.iter().copied();
    all.filter(move |root| root.purpose == purpose)
}

impl Root {
    /// Returns the certificates, the root first.
    pub fn certificates(&self) -> impl Iterator<Item = &PinnedCertificate> {
        std::iter::once(&self.root).chain(self.between)
    }
}

impl Purpose {
    /// Returns a description of what it certifies.
    pub fn words(self) -> &'static str {
        match self {
            Purpose::TpmKeys => "endorsement and attestation keys of TPMs",
            Purpose::AttestationKeys => "attestation keys of TPMs",
            Purpose::SnpReports => "reports of SEV-SNP",
            Purpose::TdxQuotes => "quotes of TDX",
            Purpose::NitroDocuments => "documents of NitroTPM",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;
    use support::openssl::openssl;

    #[test]
    fn the_table_says_what_the_certificates_are() {
        let folder = tempfile::tempdir().unwrap();
        for certificate in ALL.iter().flat_map(|root| root.certificates()) {
            let hash = ring::digest::digest(&ring::digest::SHA256, certificate.der);
            let hash: String = hash.as_ref().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(certificate.sha256, hash, "{}", certificate.subject);
            fs::write(folder.path().join("one.der"), certificate.der).unwrap();
            let shown = "x509 -inform DER -in one.der -noout -enddate -dateopt iso_8601 -subject -nameopt multiline,-align";
            let shown = openssl(folder.path(), shown);
            let end = format!("notAfter={} ", certificate.expires);
            let subject = format!("    commonName = {}\n", certificate.subject);
            assert!(shown.contains(&end) && shown.contains(&subject), "{shown}");
        }
    }

    /// Fails 90 days before the first of the certificates expires: then replace it, or remove it
    /// together with its policies.
    #[test]
    fn no_certificate_expires_soon() {
        let folder = tempfile::tempdir().unwrap();
        for certificate in ALL.iter().flat_map(|root| root.certificates()) {
            fs::write(folder.path().join("one.der"), certificate.der).unwrap();
            let seconds = 90 * 24 * 3600;
            let check = format!("x509 -inform DER -in one.der -noout -checkend {seconds}");
            let said = openssl(folder.path(), &check);
            let subject = certificate.subject;
            assert!(said.contains("will not expire"), "{subject}: {said}");
        }
    }

    #[test]
    fn each_root_signs_what_is_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, certificate: &PinnedCertificate| {
            fs::write(folder.path().join("one.der"), certificate.der).unwrap();
            openssl(
                folder.path(),
                &format!("x509 -inform DER -in one.der -out {name}"),
            );
        };
        for root in ALL {
            write("root.pem", &root.root);
            for certificate in root.certificates() {
                write("one.pem", certificate);
                let said = openssl(folder.path(), "verify -CAfile root.pem one.pem");
                assert_eq!(said.trim(), "one.pem: OK", "{}", certificate.subject);
            }
        }
    }

    /// The same machine can have certificates of two of these authorities.
    #[test]
    fn googles_pool_of_authorities_is_built_in() {
        let folder = tempfile::tempdir().unwrap();
        let mut keys = vec![];
        for certificate in GOOGLE_2022.between {
            fs::write(folder.path().join("one.der"), certificate.der).unwrap();
            let shown = "x509 -inform DER -in one.der -noout -ext subjectKeyIdentifier".to_owned();
            let shown = openssl(folder.path(), &shown);
            keys.push(shown.lines().last().unwrap().trim()[..11].to_owned());
        }
        assert_eq!(keys, ["E9:66:73:54", "0F:21:9D:56", "67:C3:BB:DE"]);
    }

    #[test]
    fn each_file_and_each_name_is_in_the_table_once() {
        let names: BTreeSet<_> = ALL.iter().map(|root| root.name).collect();
        assert_eq!(names.len(), ALL.len());
        let listed: BTreeSet<_> = ALL
            .iter()
            .flat_map(|root| root.certificates())
            .map(|certificate| certificate.der.to_vec())
            .collect();
        let folders = fs::read_dir(env!("CARGO_MANIFEST_DIR")).unwrap();
        let folders = folders.map(|entry| entry.unwrap().path());
        let files = folders
            .filter(|path| path.is_dir())
            .flat_map(|folder| fs::read_dir(folder).unwrap());
        let files: BTreeSet<_> = files
            .map(|file| fs::read(file.unwrap().path()).unwrap())
            .collect();
        assert_eq!(files, listed);
    }

    #[test]
    fn a_root_counts_for_its_purpose_only() {
        assert!(named("google-2022", Purpose::TpmKeys).is_some());
        assert!(named("azure-2023", Purpose::TpmKeys).is_none());
        assert_eq!(certifying(Purpose::SnpReports).count(), 3);
    }
}
