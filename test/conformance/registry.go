package conformance

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"regexp"
	"strings"
	"time"
)

// Registry serves the images of an OCI archive, as a mirror of the registry in their names. Clients can only read.
type Registry struct {
	blobs     map[string][]byte // by digest; manifests are blobs too
	manifests map[string]string // digests by name without the registry, such as "e2e-test-images/kitten:1.8"
	mediaType map[string]string // of manifests, by digest
}

// OpenRegistry reads an archive into memory.
func OpenRegistry(archive string) (*Registry, error) {
	file, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	r := &Registry{blobs: map[string][]byte{}, manifests: map[string]string{}, mediaType: map[string]string{}}
	for files := tar.NewReader(file); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", archive, err)
		}
		content, err := io.ReadAll(files)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", archive, err)
		}
		if digest, isBlob := strings.CutPrefix(header.Name, "blobs/sha256/"); isBlob {
			r.blobs["sha256:"+digest] = content
		} else if path.Base(header.Name) == "index.json" {
			if err := r.readIndex(content); err != nil {
				return nil, fmt.Errorf("index.json of %s: %w", archive, err)
			}
		}
	}
}

func (r *Registry) readIndex(content []byte) error {
	var index struct {
		Manifests []struct {
			MediaType   string            `json:"mediaType"`
			Digest      string            `json:"digest"`
			Annotations map[string]string `json:"annotations"`
		} `json:"manifests"`
	}
	if err := json.Unmarshal(content, &index); err != nil {
		return err
	}
	for _, m := range index.Manifests {
		_, name, _ := strings.Cut(m.Annotations["io.containerd.image.name"], "/")
		r.manifests[name] = m.Digest
		r.mediaType[m.Digest] = m.MediaType
	}
	return nil
}

var registryPath = regexp.MustCompile(`^/v2/(.+)/(manifests|blobs)/([^/]+)$`)

func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	parts := registryPath.FindStringSubmatch(request.URL.Path)
	if parts == nil {
		http.NotFound(w, request)
		return
	}
	digest := parts[3]
	if tagged, found := r.manifests[parts[1]+":"+digest]; found && parts[2] == "manifests" {
		digest = tagged
	}
	content, found := r.blobs[digest]
	if !found {
		http.NotFound(w, request)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if mediaType := r.mediaType[digest]; mediaType != "" {
		w.Header().Set("Content-Type", mediaType)
	}
	w.Header().Set("Docker-Content-Digest", digest)
	http.ServeContent(w, request, "", time.Time{}, bytes.NewReader(content))
}
