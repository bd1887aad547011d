package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/cli/diagnosis"
	"capstan.dev/capstan/internal/version"
)

// maxLog is the size of the end of a log that a bundle contains, in bytes.
const maxLog = 2 << 20

func (a *app) supportBundleCommand() *cobra.Command {
	var file string
	var keep []string
	c := &cobra.Command{
		Use: "support-bundle", Short: "Collect objects, events, states and logs in one archive, without secrets", Args: cobra.NoArgs,
		Long: `Collect objects, events and reports of the management cluster in one archive. On the box of a plane, the archive also
contains the state of the plane and the logs of its components and machines. Logs of other machines come through the management
cluster, if the user has the right to read them: the last lines of each service, for at most three minutes and 64 MiB.

Secrets are never contained. Texts of objects are contained only from fields that hold names, states, versions, sizes or
addresses: contents of files, commands, arguments, variables and foreign annotations are removed. Values of Secrets that the
user can read, and texts that look like keys, tokens or passwords, are removed from logs, messages and events. A removed value is replaced
by the name of its Secret. If a Secret contains words of logs and no secret, name it with --keep. Read the archive before you publish
it: it contains names, addresses and logs.`,
		PreRunE: func(*cobra.Command, []string) error { return errors.Join(checkKeep(keep), checkNew(file)) },
		RunE: func(c *cobra.Command, _ []string) error {
			if file == "" {
				file = "capstan-support-" + time.Now().UTC().Format("20060102-150405") + ".tar.gz"
			}
			files, words, gaps, err := a.collect(c.Context(), keep)
			if err != nil {
				return err
			}
			if err := writeBundle(file, files, time.Now()); err != nil {
				return err
			}
			if a.structured() {
				return a.print(map[string]any{"file": file, "entries": slices.Sorted(maps.Keys(files)), "unreadable": gaps, "oftenRemoved": words})
			}
			fmt.Fprintf(a.out, "%s: %d entries. Read it before you publish it.\n", file, len(files))
			printGaps(a.out, gaps)
			for _, name := range slices.Sorted(maps.Keys(words)) {
				fmt.Fprintf(a.out, "Values of the Secret %s were removed %d times. If they are words and no secrets, repeat the command with --keep %s.\n", name, words[name], name)
			}
			return nil
		},
	}
	c.Flags().StringArrayVar(&keep, "keep", nil, "NAMESPACE/NAME of a Secret whose values are no secrets and stay in the archive; can be repeated")
	c.Flags().StringVar(&file, "file", "", "path of the archive; it must not exist (default: capstan-support-TIME.tar.gz)")
	return c
}

// checkKeep checks the names of Secrets in --keep.
func checkKeep(keep []string) error {
	for _, name := range keep {
		if namespace, rest, _ := strings.Cut(name, "/"); namespace == "" || rest == "" || strings.Contains(rest, "/") {
			return coded{fmt.Errorf("expected --keep NAMESPACE/NAME, found %q", name), exitUsage}
		}
	}
	return nil
}

// checkNew refuses a file that exists.
func checkNew(file string) error {
	if atomicfile.Exists(file) {
		return coded{fmt.Errorf("expected to create %s, found a file there: choose another --file", file), exitUsage}
	}
	return nil
}

// oftenRemoved is the number of removals from which a Secret probably contains words of logs.
const oftenRemoved = 1000

// collect returns the entries of a bundle by name, the Secrets whose values were removed often, and the kinds that the user has no right to read.
// Objects that cannot be read are listed in errors.txt and do not prevent the rest.
func (a *app) collect(ctx context.Context, keep []string) (map[string][]byte, map[string]int, []gap, error) {
	files := map[string][]byte{"version.txt": []byte(version.Version + "\n")}
	known, gaps := knownSecrets(nil, nil, nil), []gap{}
	m, err := a.management()
	if err == nil {
		known, err = m.collectObjects(ctx, files, keep)
		gaps = append(gaps, m.gaps...)
	}
	local, localErr := a.chosenBoxFiles(ctx)
	if len(local) == 0 && (m == nil || !m.readable) {
		printGaps(a.out, gaps)
		if err == nil {
			err = m.noRights()
		}
		return nil, nil, nil, errors.Join(err, localErr)
	}
	maps.Copy(files, local)
	if m != nil {
		err = errors.Join(err, m.collectLogs(ctx, files, bundledLogs))
		gaps = m.gaps
	}
	var unread bytes.Buffer
	if err := errors.Join(err, localErr); err != nil {
		fmt.Fprintln(&unread, err)
	}
	printGaps(&unread, gaps)
	if unread.Len() > 0 {
		files["errors.txt"] = unread.Bytes()
	}
	for name, data := range files {
		if !strings.HasPrefix(name, objectsDir) { // Their fields are redacted one by one.
			files[name] = []byte(redactText(string(data), known))
		}
	}
	return files, known.frequent(files, oftenRemoved), gaps, nil
}

// chosenBoxFiles returns the files of the plane of this box, unless the command line or the environment chooses another management cluster.
func (a *app) chosenBoxFiles(ctx context.Context) (map[string][]byte, error) {
	loader, from, err := a.clientConfig()
	if err != nil || from == fromPlane {
		return a.boxFiles(ctx)
	}
	config, err := loader.ClientConfig()
	if err != nil {
		return a.boxFiles(ctx) // A kubeconfig that cannot be used chooses no other management cluster. The connection reports the error.
	}
	if config.Host != "" && (config.Host == a.localEndpoint() || config.Host == a.localServer()) {
		return a.boxFiles(ctx)
	}
	if a.planeHere() {
		err = fmt.Errorf("the files of this box are left out: its plane is not the management cluster %s of %s. Choose it with --root", config.Host, from)
	}
	return nil, err
}

// objectsDir contains the objects in a bundle.
const objectsDir = "objects/"

// collectObjects adds the objects, events and reports of the management cluster, and returns the values of its Secrets.
func (m *management) collectObjects(ctx context.Context, files map[string][]byte, keep []string) (*knownValues, error) {
	kinds, err := m.bundledKinds()
	if err != nil {
		return knownSecrets(nil, nil, nil), err
	}
	var failed []error
	reports, public := []report{}, map[string]bool{}
	byKind := map[schema.GroupKind][]*unstructured.Unstructured{}
	for _, gk := range kinds {
		objects, err := m.listed(ctx, gk, "")
		failed = append(failed, err)
		byKind[gk] = objects
		for _, o := range objects {
			publicTexts("", o.Object, public)
			if r := diagnose(o, nil, nil); len(r.Waiting) > 0 {
				reports = append(reports, r)
			}
		}
	}
	waiting, err1 := json.MarshalIndent(reports, "", "  ")
	lines, err2 := m.eventLines(ctx)
	secrets, err3 := m.secrets(ctx)
	files["waiting.json"], files["events.txt"] = waiting, lines
	known := knownSecrets(secrets, public, keep)
	for gk, objects := range byKind {
		var out bytes.Buffer
		for _, o := range objects {
			data, err := yaml.Marshal(redactObject(o, known).Object)
			failed = append(failed, err)
			fmt.Fprintf(&out, "---\n%s", data)
		}
		if out.Len() > 0 {
			files[objectsDir+strings.ToLower(gk.Kind)+"."+gk.Group+".yaml"] = out.Bytes()
		}
	}
	return known, errors.Join(append(failed, err1, err2, err3)...)
}

// secrets returns the Secrets that the user can list. Only their values are needed, to remove them from texts.
func (m *management) secrets(ctx context.Context) ([]corev1.Secret, error) {
	mapping, err := m.client.RESTMapper().RESTMapping(schema.GroupKind{Kind: "Secret"})
	if err != nil {
		return nil, err
	}
	list := &corev1.SecretList{}
	err = m.read(ctx, mapping, list, "")
	return list.Items, err
}

// bundledKinds are the kinds of Cluster API and its providers, and CapstanHosts.
func (m *management) bundledKinds() ([]schema.GroupKind, error) {
	resources, err := m.clusterKinds()
	if err != nil {
		return nil, err
	}
	kinds := []schema.GroupKind{
		{Group: infraGroup, Kind: "CapstanHost"}, {Group: ipamGroup, Kind: "GlobalCapstanIPPool"}, {Group: ipamGroup, Kind: "CapstanIPPool"},
		{Group: "cluster.x-k8s.io", Kind: "Cluster"}, {Group: "ipam.cluster.x-k8s.io", Kind: "IPAddressClaim"}, {Group: "ipam.cluster.x-k8s.io", Kind: "IPAddress"},
		{Group: "clusterctl.cluster.x-k8s.io", Kind: "Provider"},
	}
	for _, r := range resources {
		gvk, err := m.client.RESTMapper().KindFor(r)
		if err != nil {
			return nil, err
		}
		if gk := gvk.GroupKind(); !slices.Contains(kinds, gk) {
			kinds = append(kinds, gk)
		}
	}
	return kinds, nil
}

// eventLines returns all events that the user can list, the oldest first.
func (m *management) eventLines(ctx context.Context) ([]byte, error) {
	all, err := m.events(ctx, "")
	slices.SortFunc(all, func(x, y corev1.Event) int { return eventTime(&x).Compare(eventTime(&y)) })
	var out bytes.Buffer
	for i := range all {
		e := &all[i]
		fmt.Fprintf(&out, "%s %s %s %s/%s %s: %s\n", eventTime(e).UTC().Format(time.RFC3339), e.Type, e.InvolvedObject.Kind, e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, diagnosis.OneLine(e.Message))
	}
	return out.Bytes(), err
}

// endOf returns the last bytes of a file, from the start of a line.
func endOf(f *os.File, limit int64) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	skipped := max(0, info.Size()-limit)
	data, err := io.ReadAll(io.NewSectionReader(f, skipped, limit))
	if skipped > 0 {
		_, rest, _ := bytes.Cut(data, []byte("\n"))
		data = append(fmt.Appendf(nil, "(the first %d bytes are left out)\n", info.Size()-int64(len(rest))), rest...)
	}
	return data, err
}

// writeBundle writes the archive for its owner only. It never replaces a file.
func writeBundle(path string, files map[string][]byte, now time.Time) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	compressed := gzip.NewWriter(f)
	archive := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err = errors.Join(err, archive.WriteHeader(&tar.Header{Name: "capstan-support/" + name, Mode: 0o600, Size: int64(len(files[name])), ModTime: now}))
		if err == nil {
			_, err = archive.Write(files[name])
		}
	}
	err = errors.Join(err, archive.Close(), compressed.Close(), f.Close())
	if err != nil {
		os.Remove(path)
	}
	return err
}
