package embedded

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"capstan.dev/capstan/internal/testenv/expect"
)

// The audit log contains the user of each write, and no value of a Secret. Only its user and root can read it.
func TestAuditLog(t *testing.T) {
	p := newPlain(t)
	client := p.serve()
	ctx := t.Context()
	values := []string{"correct-horse", "battery-staple", "written-over"}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "probe"}, StringData: map[string]string{"password": values[0]}}
	_, err := client.CoreV1().Secrets("default").Create(ctx, secret, metav1.CreateOptions{})
	expect.NoError(t, err)
	_, err = client.CoreV1().Secrets("default").Patch(ctx, "probe", types.MergePatchType, fmt.Appendf(nil, `{"stringData":{"password":%q}}`, values[1]), metav1.PatchOptions{})
	expect.NoError(t, err)
	secret.StringData["password"] = values[2]
	_, err = client.CoreV1().Secrets("default").Update(ctx, secret, metav1.UpdateOptions{})
	expect.NoError(t, err)
	_, err = client.CoreV1().Secrets("default").Get(ctx, "probe", metav1.GetOptions{})
	expect.NoError(t, err)
	_, err = client.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{})
	expect.NoError(t, err)
	expect.NoError(t, client.CoreV1().Secrets("default").Delete(ctx, "probe", metav1.DeleteOptions{}))

	seen := p.audited("delete secrets")
	for _, want := range []string{"create secrets", "patch secrets", "update secrets", "get secrets", "delete secrets"} {
		e, found := seen[want]
		if !found || e.User.Username != "capstan-installer" || e.Level != auditv1.LevelMetadata || e.ObjectRef.Name != "probe" && want != "create secrets" || e.ResponseStatus.Code/100 != 2 {
			t.Errorf("%s: %+v", want, e)
		}
	}
	if e, found := seen["list configmaps"]; found {
		t.Errorf("a read is recorded: %+v", e)
	}
	data, err := os.ReadFile(p.layout.AuditLog())
	expect.NoError(t, err)
	for _, value := range values {
		for _, form := range []string{value, base64.StdEncoding.EncodeToString([]byte(value))} {
			if strings.Contains(string(data), form) {
				t.Errorf("the log contains the value of a Secret: %s", form)
			}
		}
	}
	owner, err := ensureUser()
	expect.NoError(t, err)
	for path, mode := range map[string]os.FileMode{p.layout.Audit(): 0o700, p.layout.AuditLog(): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode || int(info.Sys().(*syscall.Stat_t).Uid) != owner.uid {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
}

// serve also starts the API server.
func (p *plain) serve() kubernetes.Interface {
	p.t.Helper()
	owner, err := ensureUser()
	expect.NoError(p.t, err)
	expect.NoError(p.t, stageOne(staged(p.state)["kube-apiserver"], filepath.Join(p.layout.Bin(), "kube-apiserver")))
	api := newProcess(apiServerComponent(p.layout, p.state), p.layout.Log(apiServer), owner, newSpawner(), func(ProcessStatus) {})
	api.begin()
	p.t.Cleanup(api.Stop)
	ctx, cancel := context.WithTimeout(p.t.Context(), expect.Patience)
	defer cancel()
	if err := api.waitReady(ctx); err != nil {
		p.t.Fatalf("%v: %s", err, lastLineOf(p.layout.Log(apiServer)))
	}
	config, err := clientcmd.BuildConfigFromFlags("", p.layout.Kubeconfig(installer))
	expect.NoError(p.t, err)
	client, err := kubernetes.NewForConfig(config)
	expect.NoError(p.t, err)
	return client
}

// audited returns the entries of the log by verb and resource, after the entry of the last request was written.
func (p *plain) audited(last string) (out map[string]auditv1.Event) {
	p.t.Helper()
	expect.Eventually(p.t, "an entry "+last, func() error { // The API server writes the log asynchronously.
		out = map[string]auditv1.Event{}
		f, err := os.Open(p.layout.AuditLog())
		if err != nil {
			return err
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			var e auditv1.Event
			if json.Unmarshal(lines.Bytes(), &e) == nil && e.ObjectRef != nil && e.User.Username == "capstan-installer" {
				out[e.Verb+" "+e.ObjectRef.Resource] = e
			}
		}
		if _, found := out[last]; !found {
			return fmt.Errorf("found %v", out)
		}
		return nil
	})
	return out
}
