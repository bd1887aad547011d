package images

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	credentialproviderv1 "k8s.io/kubelet/pkg/apis/credentialprovider/v1"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

// TestCredentials: an image gets the credentials of the registry in its name only.
func TestCredentials(t *testing.T) {
	config := &nodeconfig.NodeConfiguration{Registries: []nodeconfig.Registry{
		{Host: "open.test"}, {Host: "a.test:5000", Username: "ann", Password: `p"w`}, {Host: "_default", Username: "bob", Password: "x"},
		{Host: "docker.io", Username: "carl", Password: "y"},
		{Host: "hub.test", Mirrors: []string{"https://a.test:5000"}, Username: "dora", Password: "z"},
		{Host: "same.test", Mirrors: []string{"https://a.test:5000"}, Username: "ann", Password: `p"w`},
	}}
	for image, want := range map[string]string{
		"a.test:5000/team/app:v1": `a.test:5000 ann p"w`, "docker.io/library/nginx:1": "docker.io carl y",
		"a.test/team/app:v1": "", "b.a.test:5000/app:v1": "", "open.test/app:v1": "", "_default/app:v1": "", "evil.test/a.test:5000/app:v1": "",
		"hub.test/team/app:v1": "", "same.test/team/app:v1": `same.test ann p"w`, // containerd would send them to the mirror, too.
	} {
		var out bytes.Buffer
		request := fmt.Sprintf(`{"apiVersion":"credentialprovider.kubelet.k8s.io/v1","kind":"CredentialProviderRequest","image":%q}`, image)
		if err := Credentials(strings.NewReader(request), &out, config); err != nil {
			t.Errorf("%s: %v", image, err)
			continue
		}
		var response credentialproviderv1.CredentialProviderResponse
		if err := json.Unmarshal(out.Bytes(), &response); err != nil {
			t.Fatal(err)
		}
		got := ""
		for host, auth := range response.Auth {
			got += host + " " + auth.Username + " " + auth.Password
		}
		if got != want || response.Kind != "CredentialProviderResponse" || response.CacheDuration == nil || response.CacheDuration.Duration != 0 {
			t.Errorf("%s: got %s, want %q", image, out.String(), want)
		}
	}
	for _, request := range []string{"", "{", "{}", `{"apiVersion":"credentialprovider.kubelet.k8s.io/v1"}`, `{"apiVersion":"credentialprovider.kubelet.k8s.io/v2","image":"a.test:5000/x"}`} {
		var out bytes.Buffer
		if err := Credentials(strings.NewReader(request), &out, config); err == nil || out.Len() > 0 || !strings.Contains(err.Error(), "expected") {
			t.Errorf("%q: %v, %s", request, err, out.String())
		}
	}
}
