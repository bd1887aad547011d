// Package render turns a CapstanConfig, and what it refers to, into the bootstrap data of a machine:
// one cloud-config. It is pure: everything that has to be read is in the Input.
//
// Layer: reconciler.
package render

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	// NodeUpCommand makes a node of the machine.
	NodeUpCommand = "/opt/capstan/capstan-init node up"
	// SentinelPath tells infrastructure providers that the bootstrap succeeded (BC-05).
	SentinelPath = "/run/cluster-api/bootstrap-success.complete"

	// registryCAFolder holds the certificate authorities of registries on the machine.
	registryCAFolder = "/etc/capstan/registries"
	// ownFolder may not be written to by users' files.
	ownFolder = "/etc/capstan/"

	header = "#cloud-config\n"
)

// controlPlaneTaint keeps workloads off control plane machines.
var controlPlaneTaint = bootstrapv1.Taint{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}

// uninitializedTaint keeps pods off a worker until Cluster API has synced its labels (BC-06).
var uninitializedTaint = bootstrapv1.Taint{Key: clusterv1.NodeUninitializedTaint.Key, Effect: clusterv1.NodeUninitializedTaint.Effect}

// Input is all that the bootstrap data is made from.
type Input struct {
	ClusterName string
	// KubernetesVersion with the leading v.
	KubernetesVersion string
	Role              nodeconfig.Role
	// Endpoint of the control plane, host:port.
	Endpoint string
	// APIServerPort where API servers listen on their machines.
	APIServerPort int32
	Network       nodeconfig.Network
	// Token for TLS bootstrap; workers only.
	Token string
	// Certificates are the files of the certificate authorities.
	Certificates []File
	// EncryptionKey for the encryption of secrets in etcd, 32 bytes. Control plane machines only; not
	// used with encryption mode None or a configuration of the user's.
	EncryptionKey []byte
	// Spec of the CapstanConfig.
	Spec bootstrapv1.CapstanConfigSpec
	// Secrets holds the content of everything that References names.
	Secrets map[bootstrapv1.SecretKeyReference][]byte
}

// File is a file to write to the machine.
type File struct {
	Path        string
	Permissions string
	Content     []byte
}

// writeFile is an entry of write_files.
type writeFile struct {
	Path        string `json:"path"`
	Owner       string `json:"owner"`
	Permissions string `json:"permissions"`
	Encoding    string `json:"encoding,omitempty"`
	Append      bool   `json:"append,omitempty"`
	Content     string `json:"content"`
}

type cloudConfig struct {
	WriteFiles []writeFile `json:"write_files"`
	RunCmd     []string    `json:"runcmd"`
}

// CloudConfig renders the bootstrap data. An error means that the Input itself is wrong: trying again
// with the same Input does not help.
func CloudConfig(in Input) ([]byte, error) {
	files, err := files(in)
	if err != nil {
		return nil, err
	}
	data, err := yaml.Marshal(cloudConfig{WriteFiles: files, RunCmd: commands(in.Spec)})
	if err != nil {
		return nil, fmt.Errorf("the cloud-config cannot be written as YAML: %w", err)
	}
	return append([]byte(header), data...), nil
}

// commands are one shell script, as cloud-init runs them: `set -e` ends it at the first that
// fails, so that the sentinel means success.
func commands(spec bootstrapv1.CapstanConfigSpec) []string {
	out := []string{"set -e"}
	out = append(out, spec.PreCommands...)
	out = append(out, NodeUpCommand)
	out = append(out, spec.PostCommands...)
	return append(out, "mkdir -p "+path.Dir(SentinelPath)+" && echo success > "+SentinelPath)
}

func files(in Input) ([]writeFile, error) {
	var out []writeFile
	for _, f := range in.Certificates {
		out = append(out, ownFile(f.Path, f.Permissions, f.Content))
	}
	if in.Role != nodeconfig.RoleWorker {
		documents, err := documents(in)
		if err != nil {
			return nil, err
		}
		out = append(out, documents...)
	}
	for _, r := range in.Spec.Registries {
		if r.CA.Name != "" {
			out = append(out, ownFile(registryCAPath(r.Host), "0644", in.Secrets[r.CA]))
		}
	}
	node, err := yaml.Marshal(nodeConfiguration(in))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be written as YAML: %w", nodeconfig.Path, err)
	}
	out = append(out, ownFile(nodeconfig.Path, "0600", node))
	if in.Spec.Restore.Name != "" {
		restore, err := yaml.Marshal(restore(in))
		if err != nil {
			return nil, fmt.Errorf("%s cannot be written as YAML: %w", nodeconfig.RestorePath, err)
		}
		out = append(out, ownFile(nodeconfig.RestorePath, "0600", restore))
	}
	for i, f := range in.Spec.Files {
		file, err := userFile(f, in.Secrets)
		if err != nil {
			return nil, fmt.Errorf("spec.files[%d]: %w", i, err)
		}
		out = append(out, file)
	}
	return out, nil
}

// documents are the files that the API server reads its policies from.
func documents(in Input) ([]writeFile, error) {
	var out []writeFile
	cluster := in.Spec.Cluster
	encryption, err := encryptionConfiguration(cluster.Encryption, in.EncryptionKey, in.Secrets)
	if err != nil {
		return nil, err
	}
	if encryption != nil {
		out = append(out, ownFile(nodeconfig.EncryptionConfigPath, "0600", encryption))
	}
	for _, d := range []struct {
		field, path string
		document    bootstrapv1.Document
	}{
		{"auditPolicy", nodeconfig.AuditPolicyPath, cluster.APIServer.AuditPolicy},
		{"authentication", nodeconfig.AuthenticationPath, cluster.APIServer.Authentication},
	} {
		content := documentContent(d.document, in.Secrets)
		if content == nil {
			continue
		}
		if err := yaml.Unmarshal(content, &map[string]any{}); err != nil {
			// The error is not passed on: it may quote the content, which may come from a secret.
			return nil, fmt.Errorf("spec.cluster.apiServer.%s is not a YAML document: give a mapping with apiVersion and kind", d.field)
		}
		out = append(out, ownFile(d.path, "0600", content))
	}
	return out, nil
}

func documentContent(d bootstrapv1.Document, secrets map[bootstrapv1.SecretKeyReference][]byte) []byte {
	if d.Content != "" {
		return []byte(d.Content)
	}
	if d.ContentFrom.Secret.Name != "" {
		return secrets[d.ContentFrom.Secret]
	}
	return nil
}

// ownFile writes content as it is: as text where it is text, else with base64.
func ownFile(path, permissions string, content []byte) writeFile {
	f := writeFile{Path: path, Owner: "root:root", Permissions: permissions, Content: string(content)}
	if !utf8.Valid(content) {
		f.Encoding, f.Content = "b64", base64.StdEncoding.EncodeToString(content)
	}
	return f
}

func userFile(f bootstrapv1.File, secrets map[bootstrapv1.SecretKeyReference][]byte) (writeFile, error) {
	if clean := path.Clean(f.Path); clean != f.Path {
		return writeFile{}, fmt.Errorf("path %q is not in its shortest form: write %q", f.Path, clean)
	}
	if strings.HasPrefix(f.Path, ownFolder) {
		return writeFile{}, fmt.Errorf("path %q lies in %s, which is Capstan's own", f.Path, ownFolder)
	}
	content, permissions := []byte(f.Content), "0644"
	if f.ContentFrom.Secret.Name != "" {
		content, permissions = secrets[f.ContentFrom.Secret], "0600"
	}
	out := ownFile(f.Path, permissions, content)
	if f.Permissions != "" {
		out.Permissions = f.Permissions
	}
	if f.Owner != "" {
		out.Owner = f.Owner
	}
	out.Append = ptr.Deref(f.Append, false)
	switch f.Encoding {
	case "":
	case bootstrapv1.EncodingGzip:
		// Compressed data is not text: it travels as base64.
		out.Encoding, out.Content = "gz+b64", base64.StdEncoding.EncodeToString(content)
	case bootstrapv1.EncodingBase64, bootstrapv1.EncodingGzipBase64:
		if _, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(content))); err != nil {
			return writeFile{}, fmt.Errorf("the content of %s is not base64, as its encoding %s says", f.Path, f.Encoding)
		}
		out.Encoding = map[bootstrapv1.Encoding]string{bootstrapv1.EncodingBase64: "b64", bootstrapv1.EncodingGzipBase64: "gz+b64"}[f.Encoding]
		out.Content = string(bytes.TrimSpace(content))
	}
	return out, nil
}

func nodeConfiguration(in Input) nodeconfig.NodeConfiguration {
	out := nodeconfig.NodeConfiguration{
		APIVersion:        nodeconfig.APIVersion,
		Kind:              nodeconfig.Kind,
		ClusterName:       in.ClusterName,
		KubernetesVersion: in.KubernetesVersion,
		Role:              in.Role,
		Endpoint:          in.Endpoint,
		BootstrapToken:    in.Token,
		Network:           in.Network,
		Node: nodeconfig.Node{
			Name:   in.Spec.Node.Name,
			Labels: in.Spec.Node.Labels,
			Taints: taints(in.Role, in.Spec.Node.Taints),
		},
		Kubelet:    nodeconfig.Kubelet{ExtraArgs: args(in.Spec.Kubelet.ExtraArgs)},
		Registries: registries(in),
	}
	if in.Role != nodeconfig.RoleWorker {
		out.ControlPlane = controlPlane(in)
	}
	return out
}

func controlPlane(in Input) *nodeconfig.ControlPlane {
	cluster := in.Spec.Cluster
	out := &nodeconfig.ControlPlane{
		APIServerPort:           in.APIServerPort,
		CertSANs:                cluster.APIServer.CertSANs,
		APIServer:               nodeconfig.Component{ExtraArgs: args(cluster.APIServer.ExtraArgs)},
		ControllerManager:       nodeconfig.Component{ExtraArgs: args(cluster.ControllerManager.ExtraArgs)},
		Scheduler:               nodeconfig.Component{ExtraArgs: args(cluster.Scheduler.ExtraArgs)},
		Etcd:                    nodeconfig.Component{ExtraArgs: args(cluster.Etcd.ExtraArgs)},
		AuditPolicy:             cluster.APIServer.AuditPolicy != bootstrapv1.Document{},
		Authentication:          cluster.APIServer.Authentication != bootstrapv1.Document{},
		Encryption:              cluster.Encryption.Mode != bootstrapv1.EncryptionNone,
		CertificateValidityDays: cluster.CertificateValidityDays,
	}
	if out.CertificateValidityDays == 0 {
		out.CertificateValidityDays = 365
	}
	if len(cluster.Etcd.External.Endpoints) > 0 {
		out.ExternalEtcd = &nodeconfig.ExternalEtcd{Endpoints: cluster.Etcd.External.Endpoints}
	}
	return out
}

// taints that the node registers with, as the kubelet reads them.
func taints(role nodeconfig.Role, given *[]bootstrapv1.Taint) []string {
	all := ptr.Deref(given, nil)
	switch {
	case role == nodeconfig.RoleWorker:
		all = append([]bootstrapv1.Taint{uninitializedTaint}, all...)
	case given == nil:
		all = []bootstrapv1.Taint{controlPlaneTaint}
	}
	var out []string
	for _, t := range all {
		taint := t.Key
		if t.Value != "" {
			taint += "=" + t.Value
		}
		out = append(out, taint+":"+string(t.Effect))
	}
	return out
}

func args(in []bootstrapv1.Arg) []nodeconfig.Arg {
	var out []nodeconfig.Arg
	for _, a := range in {
		out = append(out, nodeconfig.Arg{Name: a.Name, Value: a.Value})
	}
	return out
}

func registries(in Input) []nodeconfig.Registry {
	var out []nodeconfig.Registry
	for _, r := range in.Spec.Registries {
		registry := nodeconfig.Registry{
			Host:               r.Host,
			Mirrors:            r.Mirrors,
			InsecureSkipVerify: ptr.Deref(r.InsecureSkipVerify, false),
		}
		if r.CA.Name != "" {
			registry.CAFile = registryCAPath(r.Host)
		}
		if r.Credentials.Name != "" {
			username, password := credentialKeys(r.Credentials)
			registry.Username, registry.Password = string(in.Secrets[username]), string(in.Secrets[password])
		}
		out = append(out, registry)
	}
	return out
}

func registryCAPath(host string) string {
	return path.Join(registryCAFolder, strings.ReplaceAll(host, ":", "_"), "ca.crt")
}

func credentialKeys(ref bootstrapv1.SecretReference) (username, password bootstrapv1.SecretKeyReference) {
	return bootstrapv1.SecretKeyReference{Name: ref.Name, Key: corev1.BasicAuthUsernameKey},
		bootstrapv1.SecretKeyReference{Name: ref.Name, Key: corev1.BasicAuthPasswordKey}
}

// References are the keys of Secrets that the spec names, in its order.
func References(spec bootstrapv1.CapstanConfigSpec) []bootstrapv1.SecretKeyReference {
	all := []bootstrapv1.SecretKeyReference{
		spec.Cluster.APIServer.AuditPolicy.ContentFrom.Secret,
		spec.Cluster.APIServer.Authentication.ContentFrom.Secret,
		spec.Cluster.Encryption.Configuration.Secret,
	}
	for _, f := range spec.Files {
		all = append(all, f.ContentFrom.Secret)
	}
	for _, r := range spec.Registries {
		all = append(all, r.CA)
		if r.Credentials.Name != "" {
			username, password := credentialKeys(r.Credentials)
			all = append(all, username, password)
		}
	}
	keys := storeKeys(spec.Restore.Store)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		all = append(all, keys[key])
	}
	var out []bootstrapv1.SecretKeyReference
	for _, ref := range all {
		if ref.Name != "" {
			out = append(out, ref)
		}
	}
	return out
}

// Token reads the bootstrap token out of bootstrap data that CloudConfig made; "" when it has none.
// The data secret is the only place where a token is kept, so that it survives a restart of the
// provider and a move to another management cluster.
func Token(data []byte) (string, error) {
	var config cloudConfig
	if err := yaml.Unmarshal(data, &config); err != nil {
		return "", fmt.Errorf("the bootstrap data is not a cloud-config of ours") // not %w: it may quote the data
	}
	for _, f := range config.WriteFiles {
		if f.Path != nodeconfig.Path {
			continue
		}
		var node nodeconfig.NodeConfiguration
		if err := yaml.Unmarshal([]byte(f.Content), &node); err != nil {
			return "", fmt.Errorf("%s in the bootstrap data is not a NodeConfiguration", nodeconfig.Path)
		}
		return node.BootstrapToken, nil
	}
	return "", nil
}
