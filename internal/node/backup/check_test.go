package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	dynamicfake "k8s.io/client-go/dynamic/fake"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// TestCheck: the check of a backup in a real S3 store reports the keys that the backup needs, or the problem. The report contains
// no secret, and the check leaves no files on the machine.
func TestCheck(t *testing.T) {
	source := startEtcd(t, filepath.Join(t.TempDir(), "etcd"), "etcd", "http://"+ports.Address(t))
	source.put(t, "something")
	c := s3Server(t, true)
	store, err := Open(nodeconfig.BackupStore{S3: &c, Folder: "default/demo"})
	expect.NoError(t, err)
	keys := map[string]string{"ca": strings.Repeat("1", 64), "encryption": strings.Repeat("2", 64)}
	good := source.save(t, store, "good", keys)
	put := func(name string, content []byte) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "file")
		expect.NoError(t, os.WriteFile(file, content, 0o600))
		expect.NoError(t, store.Put(t.Context(), name, file))
	}
	source.save(t, store, "half", keys)
	source.save(t, store, "scrawl", keys)
	short := source.save(t, store, "short", keys)
	expect.NoError(t, store.Remove(t.Context(), "half.db"))
	put("short.db", make([]byte, 4096))
	put("scrawl.json", []byte("not JSON"))
	// The checksums of this backup are correct, but the file is not an etcd database.
	content := bytes.Repeat([]byte("capstan "), 1024)
	trailer := sha256.Sum256(content)
	content = append(content, trailer[:]...)
	whole := sha256.Sum256(content)
	file := filepath.Join(t.TempDir(), "file")
	expect.NoError(t, os.WriteFile(file, content, 0o600))
	expect.NoError(t, Save(t.Context(), store, file, Manifest{Name: "forged", SizeBytes: int64(len(content)), SHA256: hex.EncodeToString(whole[:])}))

	assets, err := testenv.Assets()
	expect.NoError(t, err)
	for what, o := range map[string]struct {
		name, sum string
		change    func(*nodeconfig.S3)
		want      string // "" if the check succeeds
	}{
		"good":                {name: "good"},
		"matching checksum":   {name: "good", sum: good.SHA256},
		"another checksum":    {name: "good", sum: strings.Repeat("0", 64), want: "is a different one: expected SHA-256"},
		"missing backup":      {name: "nothing", want: "there is no backup at s3://"},
		"missing snapshot":    {name: "half", want: "there is no backup at s3://"},
		"incomplete snapshot": {name: "short", want: fmt.Sprintf("is incomplete: expected %d bytes, found 4096", short.SizeBytes)},
		"invalid manifest":    {name: "scrawl", want: "is not the manifest of a backup"},
		"invalid database":    {name: "forged", want: "is damaged: etcdutl snapshot status"},
		"wrong key":           {name: "good", change: func(c *nodeconfig.S3) { c.SecretAccessKey = "something-secret" }, want: "Access Denied"},
		"unknown authority":   {name: "good", change: func(c *nodeconfig.S3) { c.CA = "" }, want: "certificate"},
		"connection refused":  {name: "good", change: func(c *nodeconfig.S3) { c.Endpoint = "https://" + ports.Address(t) }, want: "refused"},
		"missing bucket":      {name: "good", change: func(c *nodeconfig.S3) { c.Bucket = "nothing" }, want: "there is no backup at s3://"},
		"no credentials":      {name: "good", change: func(c *nodeconfig.S3) { c.AccessKeyID = "" }, want: "s3://"},
	} {
		t.Run(what, func(t *testing.T) {
			c := c
			if o.change != nil {
				o.change(&c)
			}
			encode := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
			secret := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"namespace": etcdv1.BackupSecretNamespace, "name": etcdv1.RestoreSecretName},
				"data": map[string]any{etcdv1.S3AccessKeyID: encode(c.AccessKeyID), etcdv1.S3SecretAccessKey: encode(c.SecretAccessKey), etcdv1.S3CA: encode(c.CA)},
			}}
			r := &Runner{
				Name: "me", Client: dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), secret), Etcdutl: filepath.Join(assets, "etcdutl"),
				Dir: filepath.Join(t.TempDir(), "scratch"), Log: slog.New(slog.DiscardHandler),
			}
			got := r.check(t.Context(), etcdv1.EtcdBackupCheck{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: etcdv1.EtcdBackupCheckSpec{
				Member: "me", Backup: o.name, SHA256: o.sum, Folder: "default/demo",
				Store: etcdv1.BackupStore{S3: etcdv1.S3Store{Endpoint: c.Endpoint, Bucket: c.Bucket, Region: c.Region}},
			}})
			if o.want == "" {
				if got.Phase != etcdv1.CheckSucceeded || got.Message != "" || got.SizeBytes != good.SizeBytes || len(got.Keys) != 2 || got.Keys[0].Name != "ca" ||
					!strings.HasSuffix(got.Location, "/backups/default/demo/good.db") {
					t.Errorf("%+v", got)
				}
			} else if got.Phase != etcdv1.CheckFailed || !strings.Contains(got.Message, o.want) {
				t.Errorf("got %+v, want %q", got, o.want)
			}
			if strings.Contains(got.Message, c.SecretAccessKey) {
				t.Errorf("the message contains a secret: %s", got.Message)
			}
			if _, err := os.Stat(r.Dir + ".check"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the check left the backup on the machine: %v", err)
			}
		})
	}
}

// TestRoom: a check of a backup does not fill etcd's disk.
func TestRoom(t *testing.T) {
	expect.NoError(t, Room(t.TempDir(), 1))
	if err := Room(t.TempDir(), 1<<60); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Error(err)
	}
}
