// A CSI driver for tests: the node plugin that opens an encrypted volume with a key of the key service, and mounts it. The program is
// also the kubelet that calls it, and a client of the key service as Constellation's drivers have it.
//
//	csi_driver serve ENDPOINT KEY-SERVICE NAME FOLDER    the plugin; FOLDER has the token and the key service's certificate, ca.crt
//	csi_driver stage ENDPOINT VOLUME DEVICE PATH         NodeStageVolume
//	csi_driver unstage ENDPOINT VOLUME PATH              NodeUnstageVolume
//	csi_driver old KEY-SERVICE UUID                      prints the key in hex: plaintext, no token
//
// A driver for production also has to survive a crash between its steps, to resize and to clone.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

const keyLength = 32

// plain is a message as bytes: the two messages of kms.proto need no generated code.
type plain []byte

type codec struct{}

func (codec) Marshal(v any) ([]byte, error)      { return *v.(*plain), nil }
func (codec) Unmarshal(data []byte, v any) error { *v.(*plain) = append(plain{}, data...); return nil }
func (codec) Name() string                       { return "proto" }

// dataKey calls GetDataKey with these fields: 1 data_key_id, 3 csi_driver, 4 volume_handle.
func dataKey(ctx context.Context, address string, security credentials.TransportCredentials, fields map[protowire.Number]string) ([]byte, error) {
	connection, err := grpc.Dial(address, grpc.WithTransportCredentials(security))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	var request, response plain
	for _, number := range []protowire.Number{1, 3, 4} {
		if fields[number] != "" {
			request = protowire.AppendTag(request, number, protowire.BytesType)
			request = protowire.AppendString(request, fields[number])
		}
	}
	request = protowire.AppendTag(request, 2, protowire.VarintType)
	request = protowire.AppendVarint(request, keyLength)
	if err := connection.Invoke(ctx, "/kms.API/GetDataKey", &request, &response, grpc.ForceCodec(codec{})); err != nil {
		return nil, err
	}
	number, kind, size := protowire.ConsumeTag(response)
	if size < 0 || number != 1 || kind != protowire.BytesType {
		return nil, errors.New("the key service answered without a key")
	}
	key, size := protowire.ConsumeBytes(response[size:])
	if size < 0 || len(key) != keyLength {
		return nil, fmt.Errorf("expected a key of %d bytes, got %d", keyLength, len(key))
	}
	return key, nil
}

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	keyService, name, folder string
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "test"}, nil
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	stages := &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		{Type: &csi.NodeServiceCapability_Rpc{Rpc: stages}},
	}}, nil
}

// key asks for the key of a volume: over TLS with the key service's own certificate, and with the token of this pod.
func (d *driver) key(ctx context.Context, volume string) ([]byte, error) {
	certificate, err := os.ReadFile(filepath.Join(d.folder, "ca.crt"))
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(filepath.Join(d.folder, "token"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(certificate) {
		return nil, errors.New("ca.crt contains no certificate")
	}
	security := credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: "key-service.kube-system.svc"})
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+strings.TrimSpace(string(token)))
	return dataKey(ctx, d.keyService, security, map[protowire.Number]string{3: d.name, 4: volume})
}

func (d *driver) NodeStageVolume(ctx context.Context, request *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	device, path := request.PublishContext["devicePath"], request.StagingTargetPath
	if request.VolumeId == "" || device == "" || path == "" {
		return nil, status.Error(codes.InvalidArgument, "expected volume_id, staging_target_path and publish_context[devicePath]")
	}
	key, err := d.key(ctx, request.VolumeId)
	if err != nil {
		return nil, status.Errorf(status.Code(err), "no key for the volume %s: %v", request.VolumeId, status.Convert(err).Message())
	}
	if err := stage(key, device, mapping(request.VolumeId), path); err != nil {
		return nil, status.Errorf(codes.Internal, "volume %s on %s: %v", request.VolumeId, device, err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func (d *driver) NodeUnstageVolume(_ context.Context, request *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := syscall.Unmount(request.StagingTargetPath, 0); err != nil && err != syscall.EINVAL && err != syscall.ENOENT {
		return nil, status.Errorf(codes.Internal, "unmount %s: %v", request.StagingTargetPath, err)
	}
	name := mapping(request.VolumeId)
	if _, err := os.Stat("/dev/mapper/" + name); err == nil {
		if _, err := run(nil, "cryptsetup", "close", name); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func mapping(volume string) string {
	hash := sha256.Sum256([]byte(volume))
	return "csi-" + hex.EncodeToString(hash[:8])
}

// stage opens the volume, which it formats if it is blank, and mounts it.
func stage(key []byte, device, name, path string) error {
	mapped, isNew := "/dev/mapper/"+name, false
	if _, err := os.Stat(mapped); err != nil {
		if _, err := run(nil, "cryptsetup", "isLuks", "--type", "luks2", device); err != nil {
			if err := mustBeBlank(device); err != nil {
				return err
			}
			isNew = true
			// The key is random: the key derivation needs no cost.
			if _, err := run(key, "cryptsetup", "luksFormat", "--batch-mode", "--type", "luks2", "--cipher", "aes-xts-plain64",
				"--key-size", "512", "--sector-size", "4096", "--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-parallel", "4",
				"--pbkdf-force-iterations", "4", "--key-file", "-", device); err != nil {
				return err
			}
		}
		if err := open(key, device, name); err != nil {
			return err
		}
	}
	if isNew {
		if _, err := run(nil, "/sbin/mke2fs", "-q", "-t", "ext4", mapped); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	err := syscall.Mount(mapped, path, "ext4", 0, "")
	if err == syscall.EBUSY { // staged before
		return nil
	}
	return err
}

// open opens the volume with a copy of its header in memory, so that the host cannot replace the header after its check.
func open(key []byte, device, name string) error {
	folder, err := os.MkdirTemp("/run", "header")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	header := filepath.Join(folder, "header")
	if _, err := run(nil, "cryptsetup", "luksHeaderBackup", device, "--header-backup-file", header); err != nil {
		return err
	}
	dump, err := run(nil, "cryptsetup", "luksDump", "--dump-json-metadata", header)
	if err != nil {
		return err
	}
	if err := check(dump); err != nil {
		return err
	}
	_, err = run(key, "cryptsetup", "open", "--type", "luks2", "--header", header, "--key-file", "-", device, name)
	return err
}

// check refuses a header that the host could have made: one with a cipher that does not encrypt.
func check(dump []byte) error {
	const cipher = "aes-xts-plain64"
	var header struct {
		Keyslots map[string]struct {
			Area struct{ Encryption string }
			KDF  struct{ Type string }
		}
		Segments map[string]struct{ Type, Encryption string }
	}
	if err := json.Unmarshal(dump, &header); err != nil {
		return err
	}
	if len(header.Keyslots) != 1 || len(header.Segments) != 1 {
		return errors.New("the header has not one keyslot and one segment")
	}
	for _, slot := range header.Keyslots {
		if slot.Area.Encryption != cipher || slot.KDF.Type != "argon2id" {
			return fmt.Errorf("the keyslot has %s and %s, expected %s and argon2id", slot.Area.Encryption, slot.KDF.Type, cipher)
		}
	}
	for _, segment := range header.Segments {
		if segment.Type != "crypt" || segment.Encryption != cipher {
			return fmt.Errorf("the segment has %s, expected %s", segment.Encryption, cipher)
		}
	}
	return nil
}

func mustBeBlank(device string) error {
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	defer file.Close()
	start := make([]byte, 1<<20)
	if _, err := io.ReadFull(file, start); err != nil {
		return err
	}
	if !bytes.Equal(start, make([]byte, len(start))) {
		return errors.New("it has data, but no LUKS2 header: it is not formatted")
	}
	return nil
}

// run runs a program, with the key as its standard input.
func run(key []byte, program string, arguments ...string) ([]byte, error) {
	command := exec.Command(program, arguments...)
	var output, problems bytes.Buffer
	command.Stdin, command.Stdout, command.Stderr = bytes.NewReader(key), &output, &problems
	if err := command.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %v: %s", program, arguments[0], err, strings.TrimSpace(problems.String()))
	}
	return output.Bytes(), nil
}

func serve(endpoint, keyService, name, folder string) error {
	listener, err := net.Listen("unix", endpoint)
	if err != nil {
		return err
	}
	d := &driver{keyService: keyService, name: name, folder: folder}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, d)
	csi.RegisterNodeServer(server, d)
	return server.Serve(listener)
}

// call calls the plugin as a kubelet does.
func call(endpoint string, do func(context.Context, csi.NodeClient) error) error {
	connection, err := grpc.Dial("unix://"+endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return do(ctx, csi.NewNodeClient(connection))
}

func main() {
	words := append(os.Args[1:], "", "", "", "", "")
	var err error
	switch words[0] {
	case "serve":
		err = serve(words[1], words[2], words[3], words[4])
	case "stage":
		err = call(words[1], func(ctx context.Context, node csi.NodeClient) error {
			_, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId:          words[2],
				PublishContext:    map[string]string{"devicePath": words[3]},
				StagingTargetPath: words[4],
				VolumeCapability: &csi.VolumeCapability{
					AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
					AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
				},
			})
			return err
		})
	case "unstage":
		err = call(words[1], func(ctx context.Context, node csi.NodeClient) error {
			_, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: words[2], StagingTargetPath: words[3]})
			return err
		})
	case "old":
		var key []byte
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		key, err = dataKey(ctx, words[1], insecure.NewCredentials(), map[protowire.Number]string{1: words[2]})
		if err == nil {
			fmt.Println(hex.EncodeToString(key))
		}
	default:
		err = errors.New("expected serve, stage, unstage or old")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
