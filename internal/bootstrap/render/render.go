// Package render turns a CapstanConfig and the objects that it references into the bootstrap data of a machine: one
// cloud-config. It is a pure function of its Input and reads nothing else.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package render

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	// ownFolder is Capstan's folder. Files of users must lie elsewhere.
	ownFolder = "/etc/capstan/"

	header = "#cloud-config\n"

	// maxNameBytes is the longest name of a file or folder on a machine.
	maxNameBytes = 255
)

// controlPlaneTaint keeps workloads off control plane machines.
var controlPlaneTaint = bootstrapv1.Taint{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}

// uninitializedTaint keeps pods off a worker until Cluster API has synced its labels (BC-06).
var uninitializedTaint = bootstrapv1.Taint{Key: clusterv1.NodeUninitializedTaint.Key, Effect: clusterv1.NodeUninitializedTaint.Effect}

// Input contains everything that the bootstrap data is rendered from.
type Input struct {
	ClusterName string
	// KubernetesVersion starts with v.
	KubernetesVersion string
	Role              nodeconfig.Role
	// Endpoint of the control plane, host:port.
	Endpoint string
	// APIServerPort is the port of API servers on their machines.
	APIServerPort int32
	Network       nodeconfig.Network
	// Token for TLS bootstrap; workers only.
	Token string
	// Certificates are the files of the certificate authorities.
	Certificates []File
	// EncryptionKey for the encryption of secrets in etcd, 32 bytes. It is for control plane machines only, and unused
	// with encryption mode None or the user's own configuration.
	EncryptionKey []byte
	// Spec of the CapstanConfig.
	Spec bootstrapv1.CapstanConfigSpec
	// Secrets contains the value of each key of a Secret that References returns, and ConfigMaps those of ConfigMaps.
	Secrets    map[bootstrapv1.SecretKeyReference][]byte
	ConfigMaps map[bootstrapv1.ConfigMapKeyReference][]byte
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
	// Defer the file until the users exist.
	Defer   bool   `json:"defer,omitempty"`
	Content string `json:"content"`
}

type cloudConfig struct {
	Users      []user      `json:"users,omitempty"`
	WriteFiles []writeFile `json:"write_files"`
	RunCmd     []string    `json:"runcmd"`
}

// CloudConfig renders the bootstrap data. An error means that the Input is invalid: another attempt with the same Input
// fails as well.
func CloudConfig(in Input) ([]byte, error) {
	files, err := files(in)
	if err != nil {
		return nil, err
	}
	users, err := users(in)
	if err != nil {
		return nil, err
	}
	return marshal(cloudConfig{Users: users, WriteFiles: files, RunCmd: commands(in.Spec)})
}

// Update renders the data of an update in place: the configuration of the node, and the files and commands that can be
// repeated. It has none of the parts that a machine uses once (ForUpdate, the bootstrap token), and no certificate authority:
// authorities reach a machine that runs by their rotation. Equal inputs give equal data.
func Update(in Input) ([]byte, error) {
	in.Token, in.Certificates, in.Spec = "", nil, ForUpdate(in.Spec)
	files, err := files(in)
	if err != nil {
		return nil, err
	}
	return marshal(cloudConfig{WriteFiles: files, RunCmd: append([]string{nodeconfig.UpdateCommand}, in.Spec.UpdateCommands...)})
}

// ForUpdate returns a spec without the parts that a machine uses once: the restore, the passwords of users, and files that are not
// repeatable. So an update in place needs no Secret that only these parts reference.
func ForUpdate(spec bootstrapv1.CapstanConfigSpec) bootstrapv1.CapstanConfigSpec {
	spec.Restore = bootstrapv1.RestoreSource{}
	spec.Users = slices.Clone(spec.Users) // The owners of files stay.
	for i := range spec.Users {
		spec.Users[i].PasswdFrom = bootstrapv1.PasswdSource{}
	}
	spec.Files = slices.DeleteFunc(slices.Clone(spec.Files), func(f bootstrapv1.File) bool { return !ptr.Deref(f.Repeatable, false) })
	return spec
}

func marshal(c cloudConfig) ([]byte, error) {
	data, err := yaml.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("the cloud-config cannot be written as YAML: %w", err)
	}
	return append([]byte(header), data...), nil
}

// commands returns one shell script, as cloud-init runs it. `set -e` ends it at the first command that fails, so the
// sentinel means success.
func commands(spec bootstrapv1.CapstanConfigSpec) []string {
	out := []string{nodeconfig.EndOnFailure}
	out = append(out, spec.PreCommands...)
	out = append(out, nodeconfig.UpCommand)
	out = append(out, spec.PostCommands...)
	return append(out, "mkdir -p "+path.Dir(nodeconfig.SentinelPath)+" && echo success > "+nodeconfig.SentinelPath)
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
	authorities, err := registryAuthorities(in)
	if err != nil {
		return nil, err
	}
	out = append(out, authorities...)
	config, err := nodeConfiguration(in)
	if err != nil {
		return nil, err
	}
	node, err := yaml.Marshal(config)
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
	left := int64(MaxUnpacked)
	for i, f := range in.Spec.Files {
		file, err := in.userFile(f, &left)
		if err != nil {
			return nil, fmt.Errorf("spec.files[%d]: %w", i, err)
		}
		out = append(out, file)
	}
	return out, nil
}

// documents returns the files from which the API server reads its policies.
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
		content := in.document(d.document)
		if content == nil {
			continue
		}
		if err := Document(content, &map[string]any{}); err != nil {
			return nil, fmt.Errorf("spec.cluster.apiServer.%s is not a YAML document: write a mapping with apiVersion and kind, without many aliases", d.field)
		}
		out = append(out, ownFile(d.path, "0600", content))
	}
	return out, nil
}

var errDocument = errors.New("it is not a YAML document, or has too many aliases")

// Document decodes a YAML document that a tenant can have written. Its error does not quote the document, which can be from a Secret.
func Document(content []byte, into any) error {
	if manifest.CheckAliases(content) != nil || yaml.Unmarshal(content, into) != nil {
		return errDocument
	}
	return nil
}

// document returns the content of a document, or nil without one.
func (in Input) document(d bootstrapv1.Document) []byte {
	if d.Content != "" {
		return []byte(d.Content)
	}
	return in.source(d.ContentFrom)
}

// source returns the content of a source, or nil without one.
func (in Input) source(from bootstrapv1.ContentSource) []byte {
	switch {
	case from.Secret.Name != "":
		return in.Secrets[from.Secret]
	case from.ConfigMap.Name != "":
		return in.ConfigMaps[from.ConfigMap]
	}
	return nil
}

// ownFile returns a file with unchanged content: as text if it is UTF-8 text, otherwise as base64.
func ownFile(path, permissions string, content []byte) writeFile {
	f := writeFile{Path: path, Owner: "root:root", Permissions: permissions, Content: string(content)}
	if !utf8.Valid(content) {
		f.Encoding, f.Content = "b64", base64.StdEncoding.EncodeToString(content)
	}
	return f
}

// MaxUnpacked bounds the work of a check of all files of a spec. Only the machine checks the content behind it.
const MaxUnpacked = cloudconfig.MaxFileBytes

// CheckFile checks a file as CloudConfig does, without content that it references. left is the rest of MaxUnpacked for it and the next files.
// It is negative if content was not checked.
func CheckFile(f bootstrapv1.File, left *int64) error {
	if f.ContentFrom != (bootstrapv1.ContentSource{}) {
		f.Encoding = ""
	}
	_, err := Input{}.userFile(f, left)
	return err
}

func checkPath(name string) error {
	if clean := path.Clean(name); clean != name {
		return fmt.Errorf("path %q is not in its shortest form: write %q", name, clean)
	}
	if strings.HasPrefix(name, ownFolder) {
		return fmt.Errorf("path %q lies in %s, which only Capstan writes", name, ownFolder)
	}
	if strings.ContainsAny(name, "\x00\n") {
		return fmt.Errorf("path %q contains a line break or a zero byte", name)
	}
	const suffix = cloudconfig.TemporarySuffix + "0"
	for part := range strings.SplitSeq(name+suffix, "/") {
		if len(part) > maxNameBytes {
			return fmt.Errorf("path %q: expected at most %d bytes for the name of a folder, and %d for that of the file", name, maxNameBytes, maxNameBytes-len(suffix))
		}
	}
	return nil
}

func (in Input) userFile(f bootstrapv1.File, left *int64) (writeFile, error) {
	if err := checkPath(f.Path); err != nil {
		return writeFile{}, err
	}
	content, permissions := []byte(f.Content), "0644"
	switch {
	case f.ContentFrom.Secret.Name != "":
		content, permissions = in.source(f.ContentFrom), "0600"
	case f.ContentFrom.ConfigMap.Name != "":
		content = in.source(f.ContentFrom)
	}
	out := ownFile(f.Path, permissions, content)
	if f.Permissions != "" {
		out.Permissions = f.Permissions
	}
	if f.Owner != "" {
		out.Owner = f.Owner
		out.Defer = ownerOfUsers(f.Owner, in.Spec.Users)
	}
	out.Append = ptr.Deref(f.Append, false)
	switch f.Encoding {
	case "":
		return out, nil
	case bootstrapv1.EncodingGzip:
		// Compressed data is not text and needs base64.
		out.Encoding, out.Content = "gz+b64", base64.StdEncoding.EncodeToString(content)
	case bootstrapv1.EncodingBase64:
		out.Encoding, out.Content = "b64", string(bytes.TrimSpace(content))
	case bootstrapv1.EncodingGzipBase64:
		out.Encoding, out.Content = "gz+b64", string(bytes.TrimSpace(content))
	}
	if *left < 0 {
		return out, nil
	}
	size, err := cloudconfig.DecodedSize(out.Content, out.Encoding, *left)
	*left -= size
	if err != nil {
		return writeFile{}, fmt.Errorf("%w, but the encoding of %s is %s", err, f.Path, f.Encoding)
	}
	if size > cloudconfig.MaxFileBytes {
		return writeFile{}, fmt.Errorf("the content of %s has more than %d MiB unpacked: download large files with a command", f.Path, cloudconfig.MaxFileBytes>>20)
	}
	return out, nil
}

// nodeConfiguration checks the settings of components with the functions of the machine, which would fail with them.
func nodeConfiguration(in Input) (nodeconfig.NodeConfiguration, error) {
	registries, err := registries(in)
	if err != nil {
		return nodeconfig.NodeConfiguration{}, err
	}
	kubelet, err := patch("kubelet.configuration", in.Spec.Kubelet.Configuration)
	if err != nil {
		return nodeconfig.NodeConfiguration{}, err
	}
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
		Kubelet:    nodeconfig.Kubelet{ExtraArgs: args(in.Spec.Kubelet.ExtraArgs), Env: env(in.Spec.Kubelet.Env), Configuration: kubelet},
		Registries: registries,
		Images:     in.Spec.Images,
		Proxy:      proxy(in.Spec.Proxy),
	}
	kubeProxy, err := patch("kubeProxy.configuration", in.Spec.KubeProxy.Configuration)
	if err != nil {
		return out, err
	}
	if kubeProxy != nil || len(in.Spec.KubeProxy.Env) > 0 {
		out.KubeProxy = &nodeconfig.KubeProxy{Env: env(in.Spec.KubeProxy.Env), Configuration: kubeProxy}
	}
	if in.Role != nodeconfig.RoleWorker {
		out.ControlPlane = controlPlane(in)
	}
	problems := slices.Concat(out.CheckSettings(), out.CheckArguments(), out.CheckFolders())
	if in.Spec.Restore.Name != "" {
		problems = append(problems, out.CheckRestorable())
	}
	if err := errors.Join(problems...); err != nil {
		return out, fmt.Errorf("spec.%w", err)
	}
	return out, nil
}

func controlPlane(in Input) *nodeconfig.ControlPlane {
	cluster := in.Spec.Cluster
	out := &nodeconfig.ControlPlane{
		APIServerPort:           in.APIServerPort,
		CertSANs:                cluster.APIServer.CertSANs,
		APIServer:               component(cluster.APIServer.ExtraArgs, cluster.APIServer.Env),
		ControllerManager:       component(cluster.ControllerManager.ExtraArgs, cluster.ControllerManager.Env),
		Scheduler:               component(cluster.Scheduler.ExtraArgs, cluster.Scheduler.Env),
		Etcd:                    component(cluster.Etcd.ExtraArgs, cluster.Etcd.Env),
		AuditPolicy:             cluster.APIServer.AuditPolicy != bootstrapv1.Document{},
		Authentication:          cluster.APIServer.Authentication != bootstrapv1.Document{},
		Encryption:              cluster.Encryption.Mode != bootstrapv1.EncryptionNone,
		CertificateValidityDays: cluster.CertificateValidityDays,
		EncryptionAlgorithm:     string(cluster.EncryptionAlgorithm),
	}
	if out.CertificateValidityDays == 0 {
		out.CertificateValidityDays = 365
	}
	if len(cluster.Etcd.External.Endpoints) > 0 {
		out.ExternalEtcd = &nodeconfig.ExternalEtcd{Endpoints: cluster.Etcd.External.Endpoints}
	}
	out.CoreDNS = coreDNS(cluster.CoreDNS)
	out.LocalVolumes = string(cluster.LocalVolumes)
	out.MetricsServer = cluster.ResourceMetrics == bootstrapv1.ResourceMetricsServer
	return out
}

// taints returns the taints with which the node registers, in the kubelet's notation.
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

func component(extraArgs []bootstrapv1.Arg, variables []bootstrapv1.EnvVar) nodeconfig.Component {
	return nodeconfig.Component{ExtraArgs: args(extraArgs), Env: env(variables)}
}

func env(in []bootstrapv1.EnvVar) []nodeconfig.Arg {
	var out []nodeconfig.Arg
	for _, v := range in {
		out = append(out, nodeconfig.Arg{Name: v.Name, Value: v.Value})
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

// Token returns the bootstrap token in bootstrap data that CloudConfig rendered, or "" without a token. Only the data
// secret stores the token, so it survives a restart of the provider and a move to another management cluster.
func Token(data []byte) (string, error) {
	config, err := parse(data)
	if err != nil {
		return "", err
	}
	for _, f := range config.WriteFiles {
		if f.Path != nodeconfig.Path {
			continue
		}
		var node nodeconfig.NodeConfiguration
		if err := Document([]byte(f.Content), &node); err != nil {
			return "", fmt.Errorf("%s in the bootstrap data is not a NodeConfiguration", nodeconfig.Path)
		}
		return node.BootstrapToken, nil
	}
	return "", nil
}

// WithCertificates returns bootstrap data that CloudConfig rendered, with other content of certificates that it has. It needs none of the
// inputs of the rest.
func WithCertificates(data []byte, certificates []File) ([]byte, error) {
	config, err := parse(data)
	if err != nil {
		return nil, err
	}
	for _, c := range certificates {
		i := slices.IndexFunc(config.WriteFiles, func(f writeFile) bool { return f.Path == c.Path })
		if i < 0 {
			return nil, fmt.Errorf("the bootstrap data has no file %s", c.Path)
		}
		config.WriteFiles[i] = ownFile(c.Path, c.Permissions, c.Content)
	}
	return marshal(config)
}

func parse(data []byte) (cloudConfig, error) {
	var config cloudConfig
	if err := Document(data, &config); err != nil {
		return config, errors.New("the bootstrap data is not a cloud-config of Capstan")
	}
	return config, nil
}
