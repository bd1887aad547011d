package testenv

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// S3Bucket is the bucket of the test's S3 server.
const S3Bucket = "backups"

// S3Server starts a real S3-compatible server on loopback with further arguments. It ends with the test. S3Server
// returns its host:port. The server gets the credentials from the environment, because arguments of processes are not
// secret.
func S3Server(t *testing.T, accessKeyID, secretAccessKey, region string, args ...string) (address string) {
	t.Helper()
	program := filepath.Join(Root(), "bin", "tools", "versitygw")
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("%v: run `make versitygw`", err)
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "data", S3Bucket), 0o700); err != nil {
		t.Fatal(err)
	}
	address = ports.Address(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	args = append([]string{"--port", address, "--region", region, "--quiet"}, args...)
	cmd := exec.Command(program, append(args, "posix", "--nometa", filepath.Join(dir, "data"))...)
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY_ID="+accessKeyID, "ROOT_SECRET_ACCESS_KEY="+secretAccessKey)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("versitygw:\n%s", text)
		}
	})
	expect.Eventually(t, "versitygw listens", func() error {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	return address
}
