// Runs the tools with which Google endorses the firmware of its confidential machines and judges endorsements
// (github.com/google/gce-tcb-verifier):
//
//	firmware FILE               writes a firmware of 2 MiB that has metadata and no code
//	verify FILE ROOT FIRMWARE   judges an endorsement
//
// All else are the commands of Google's program: bootstrap makes keys, endorse signs.
package main

import (
	"crypto/sha512"
	"crypto/x509"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/gce-tcb-verifier/testing/fakeovmf"
	"github.com/google/gce-tcb-verifier/testing/nonprod"
	"github.com/google/gce-tcb-verifier/verify"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "firmware":
		return os.WriteFile(args[1], fakeovmf.CleanExample(&testing.T{}, 2<<20), 0o644)
	case len(args) == 4 && args[0] == "verify":
		return judge(args[1], args[2], args[3])
	}
	return nonprod.RootCmd.Execute()
}

func judge(file, root, firmware string) error {
	var read [3][]byte
	for index, path := range []string{file, root, firmware} {
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		read[index] = content
	}
	certificate, err := x509.ParseCertificate(read[1])
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	digest := sha512.Sum384(read[2])
	return verify.Endorsement(read[0], &verify.Options{
		RootsOfTrust:       roots,
		ExpectedUefiSha384: digest[:],
		Now:                time.Now(),
	})
}
