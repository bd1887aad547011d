//go:build e2e

package node

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"testing"
	"time"

	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/versions"
)

const (
	version     = versions.Default
	tokenID     = "e2etok"
	tokenSecret = "q7zk3vx9w2m5p8rt"
)

// authority is a CA in the form of the control plane provider.
func authority(t *testing.T, name string) (crt, key []byte) {
	t.Helper()
	private, err := pki.NewKey()
	expect.NoError(t, err)
	ca, err := pki.NewAuthority(name, private, time.Now())
	expect.NoError(t, err)
	key, err = pki.EncodeKey(private)
	expect.NoError(t, err)
	return pki.EncodeCert(ca.Cert), key
}

// cluster contains the settings that the machines of one cluster share.
type cluster struct {
	t        *testing.T
	files    map[string][]byte
	endpoint string
}

func newCluster(t *testing.T, endpoint string) *cluster {
	c := &cluster{t: t, files: map[string][]byte{}, endpoint: endpoint}
	for name, file := range map[string]string{"kubernetes": "ca", "etcd": "etcd/ca", "front-proxy": "front-proxy-ca"} {
		c.files[nodeconfig.PKIDir+"/"+file+".crt"], c.files[nodeconfig.PKIDir+"/"+file+".key"] = authority(t, name)
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	c.files[nodeconfig.PKIDir+"/sa.key"], err = keyutil.MarshalPrivateKeyToPEM(private)
	expect.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	expect.NoError(t, err)
	c.files[nodeconfig.PKIDir+"/sa.pub"] = pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})
	key := make([]byte, 32)
	_, err = rand.Read(key)
	expect.NoError(t, err)
	c.files[nodeconfig.EncryptionConfigPath] = []byte(fmt.Sprintf(`apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox: {keys: [{name: key1, secret: %q}]}
  - identity: {}
`, base64.StdEncoding.EncodeToString(key)))
	return c
}

// data returns the bootstrap data of a machine, as the bootstrap provider renders it.
func (c *cluster) data(role nodeconfig.Role) []byte {
	c.t.Helper()
	config := nodeconfig.NodeConfiguration{
		APIVersion: nodeconfig.APIVersion, Kind: nodeconfig.Kind,
		ClusterName: "e2e", KubernetesVersion: version, Role: role, Endpoint: c.endpoint,
		Network: nodeconfig.Network{
			PodCIDRs: []string{"10.244.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/16"}, DNSServiceIP: "10.96.0.10",
		},
	}
	files := map[string][]byte{}
	if role == nodeconfig.RoleWorker {
		config.BootstrapToken = tokenID + "." + tokenSecret
		files[nodeconfig.PKIDir+"/ca.crt"] = c.files[nodeconfig.PKIDir+"/ca.crt"]
	} else {
		config.ControlPlane = &nodeconfig.ControlPlane{Encryption: true}
		config.Node.Taints = []string{"node-role.kubernetes.io/control-plane:NoSchedule"}
		for path, content := range c.files {
			files[path] = content
		}
	}
	var err error
	files[nodeconfig.Path], err = yaml.Marshal(config)
	expect.NoError(c.t, err)
	var writeFiles []any
	for path, content := range files {
		writeFiles = append(writeFiles, map[string]any{
			"path": path, "permissions": "0600", "owner": "root:root", "encoding": "b64",
			"content": base64.StdEncoding.EncodeToString(content),
		})
	}
	out, err := yaml.Marshal(map[string]any{
		"write_files": writeFiles,
		"runcmd":      []any{"/opt/capstan/capstan-init node up", "echo success > /run/cluster-api/bootstrap-success.complete"},
	})
	expect.NoError(c.t, err)
	return append([]byte("#cloud-config\n"), out...)
}

// tokenManifest returns the Secret of the bootstrap token.
var tokenManifest = fmt.Sprintf(`apiVersion: v1
kind: Secret
metadata: {name: bootstrap-token-%s, namespace: kube-system}
type: bootstrap.kubernetes.io/token
stringData: {token-id: %s, token-secret: %q, usage-bootstrap-authentication: "true", usage-bootstrap-signing: "false"}
`, tokenID, tokenID, tokenSecret)
